"""`allocation_mode`: who gets how many units, as text and as data. What of it is built is the plan's to say, not the parser's.

    expression : servers "+" train | servers "|" train | servers "+" ("eval"|"cpu") | servers | train
    servers    : ("embedded"|"sglang"|"vllm") name? (":"|".") (("d"|"t"|"p") SIZE)+
    train      : (("fsdp"|"megatron") name? ":")? ((("d"|"p"|"t"|"c"|"e") SIZE)+ | hybrid)
    hybrid     : "("? "attn" ":" dims(c d t p) "|" "ffn" ":" dims(d e t p) ")"?
    name       : "[" ("rollout"|"actor") "]"          SIZE : a number without leading zero; "d*" is what is left

Blanks may stand between words; dimensions may come in any order, and those not given are 1. `e` adds no units.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import Literal, NoReturn

from hpc_rl.errors import ConfigError

SERVER_BACKENDS = ("embedded", "sglang", "vllm")
TRAIN_BACKENDS = ("fsdp", "megatron")
_TOKEN = re.compile(r"\s*(?:([A-Za-z]+)|([0-9]+)|([:.+|()\[\]*]))")


@dataclass(frozen=True)
class Servers:
    """`d` replicas (None: what is left) of t * p units each."""

    backend: Literal["embedded", "sglang", "vllm"]
    d: int | None = 1
    t: int = 1
    p: int = 1

    @property
    def units_per_replica(self) -> int:
        return self.t * self.p

    @property
    def num_units(self) -> int | None:
        return None if self.d is None else self.d * self.units_per_replica

    def __str__(self) -> str:
        return f"{self.backend}:{_dims(d=self.d, t=self.t, p=self.p)}"


@dataclass(frozen=True)
class Train:
    """A training mesh of d * p * t * c units; `d` None is what is left. Experts: e groups of etp tensor ranks."""

    backend: Literal["fsdp", "megatron"]
    d: int | None = 1
    p: int = 1
    t: int = 1
    c: int = 1
    e: int = 1
    etp: int = 1

    @property
    def units_per_replica(self) -> int:
        return self.p * self.t * self.c

    @property
    def num_units(self) -> int | None:
        return None if self.d is None else self.d * self.units_per_replica

    @property
    def edp(self) -> int | None:
        """Data parallelism of the experts; d where there are none."""
        if self.e == 1 or self.num_units is None:
            return self.d
        return self.num_units // (self.p * self.etp * self.e)

    def __str__(self) -> str:
        if self.e == 1 or self.etp == self.t:
            return f"{self.backend}:{_dims(d=self.d, p=self.p, t=self.t, c=self.c, e=self.e)}"
        attention = _dims(d=self.d, p=self.p, t=self.t, c=self.c)
        experts = f"d{self.edp}t{self.etp}p{self.p}e{self.e}"  # all four: what is missing would be inherited
        return f"{self.backend}:(attn:{attention}|ffn:{experts})"


@dataclass(frozen=True)
class Allocation:
    """What one expression says. `colocate`: servers and train share units; `evaluate`: servers and a process that evaluates."""

    servers: Servers | None = None
    train: Train | None = None
    colocate: bool = False
    evaluate: bool = False

    def __str__(self) -> str:
        """The canonical form; parse reads it back to an equal object."""
        if self.evaluate:
            return f"{self.servers}+eval"
        return ("|" if self.colocate else "+").join(str(part) for part in (self.servers, self.train) if part)


def parse(text: str) -> Allocation:
    """Read an expression. Raises ConfigError that names the position and the reason."""
    if text.strip() in ("manual", "heuristic"):
        raise ConfigError(
            f"allocation_mode {text.strip()} does not exist; leave it empty to have one derived."
        )
    return _Parser(text).expression()


def _dims(**sizes: int | None) -> str:
    shown = "".join(f"{name}{'*' if size is None else size}" for name, size in sizes.items() if size != 1)
    return shown or "d1"


class _Parser:
    """Recursive descent over (kind, text, position) tokens; `self.at` is the next one."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens: list[tuple[str, str, int]] = []
        self.at = 0
        position, end = 0, len(text.rstrip())
        while position < end:
            match = _TOKEN.match(text, position)
            if not match or not match.lastindex:
                start = position + len(text[position:]) - len(text[position:].lstrip())
                self.fail(f"{text[start]!r} can't stand here", start)
            kind = ("word", "number", "sign")[match.lastindex - 1]
            self.tokens.append((kind, match.group(match.lastindex), match.start(match.lastindex)))
            position = match.end()
        self.tokens.append(("end", "", end))

    def fail(self, reason: str, position: int | None = None) -> NoReturn:
        where = self.tokens[self.at][2] if position is None else position
        shown = self.text if len(self.text) <= 200 else f"{self.text[:100]}…"
        raise ConfigError(
            f"allocation_mode {shown!r}, character {where + 1}: {reason}{'' if reason.endswith('?') else '.'}"
        )

    def peek(self, ahead: int = 0) -> str:
        return self.tokens[min(self.at + ahead, len(self.tokens) - 1)][1]

    def take(self, *allowed: str) -> str:
        kind, text, _ = self.tokens[self.at]
        if text not in allowed or kind == "end":
            found = "the end" if kind == "end" else repr(text)
            self.fail(f"expected {' or '.join(map(repr, allowed))}, found {found}")
        self.at += 1
        return text

    def done(self) -> bool:
        return self.tokens[self.at][0] == "end"

    def expression(self) -> Allocation:
        if self.done():
            self.fail("it is empty")
        kind, word, _ = self.tokens[self.at]
        if kind == "word" and len(word) > 1 and word not in (*SERVER_BACKENDS, *TRAIN_BACKENDS, "attn"):
            near = difflib.get_close_matches(word.lower(), [*SERVER_BACKENDS, *TRAIN_BACKENDS], n=1)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"known: {', '.join([*SERVER_BACKENDS, *TRAIN_BACKENDS])}"
            )
            self.fail(f"{word!r} is no backend; {hint}")
        result = self._servers_first() if self.peek() in SERVER_BACKENDS else Allocation(train=self.train())
        if not self.done():
            self.fail(f"{self.peek()!r} can't stand here; the expression has ended")
        return result

    def _servers_first(self) -> Allocation:
        servers = self.servers()
        if self.done():
            return Allocation(servers=servers)
        sign_at = self.tokens[self.at][2]
        sign = self.take("+", "|")
        if sign == "+" and self.peek() in ("eval", "cpu"):
            self.at += 1
            return Allocation(servers=servers, evaluate=True)
        train = self.train()
        if sign == "|" and servers.num_units != train.num_units:
            both = f"servers have {servers.num_units or 'd*'} units, training has {train.num_units or 'd*'}"
            self.fail(f"'|' means the same units for both, but {both}", sign_at)
        return Allocation(servers=servers, train=train, colocate=sign == "|")

    def servers(self) -> Servers:
        start = self.tokens[self.at][2]
        backend = self.take(*SERVER_BACKENDS)
        named = self.name("rollout")
        self.take(*(":" if named else ":."))
        sizes = self.dims("dtp", f"{backend} servers have d, t and p")
        if backend == "embedded" and (sizes.get("t", 1) or 1) * (sizes.get("p", 1) or 1) > 1:
            self.fail("an embedded server is one process: it has d only, as embedded:d4", start)
        return Servers(backend, **sizes)  # type: ignore[arg-type]

    def train(self) -> Train:
        backend = None
        if self.peek() in TRAIN_BACKENDS:
            backend = self.take(*TRAIN_BACKENDS)
            self.name("actor")
            self.take(":")
        start = self.tokens[self.at][2]
        if self.peek() in ("(", "attn"):
            if backend == "fsdp":
                self.fail("fsdp has no attn|ffn form; only megatron has", start)
            return self.hybrid(start)
        sizes = self.dims("dptce", "training has d, p, t, c and e")
        pipeline, experts = sizes.get("p", 1) or 1, sizes.get("e", 1) or 1
        if backend == "fsdp" and (pipeline > 1 or experts > 1):
            self.fail(f"fsdp has no {'p' if pipeline > 1 else 'e'}; only megatron has", start)
        backend = backend or ("megatron" if pipeline > 1 or experts > 1 else "fsdp")
        etp = (sizes.get("t", 1) or 1) if experts > 1 else 1
        mesh = Train(backend, etp=etp, **sizes)  # type: ignore[arg-type]
        if experts > 1 and mesh.num_units is not None and mesh.num_units % (pipeline * etp * experts):
            self.fail(
                f"{mesh.num_units} units can't be split by p*t*e = {pipeline * etp * experts} for the experts",
                start,
            )
        return mesh

    def hybrid(self, start: int) -> Train:
        opened = self.peek() == "("
        if opened:
            self.at += 1
        self.take("attn")
        self.take(":")
        attention = {"d": 1, "p": 1, "t": 1, "c": 1} | self.sizes("cdtp", "attn has c, d, t and p")
        self.take("|")
        self.take("ffn")
        self.take(":")
        inherited = {key: attention[key] for key in "dtp"}
        experts = inherited | {"e": 1} | self.sizes("detp", "ffn has d, e, t and p")
        if opened:
            self.take(")")
        if experts["p"] != attention["p"]:
            self.fail(f"ffn p {experts['p']} must equal attn p {attention['p']}", start)
        units = attention["d"] * attention["t"] * attention["p"] * attention["c"]
        expert_units = experts["d"] * experts["p"] * experts["t"] * experts["e"]
        if units != expert_units:
            self.fail(f"attn has {units} units, ffn has {expert_units}; they must be equal", start)
        etp = experts["t"] if experts["e"] > 1 else 1
        return Train("megatron", e=experts["e"], etp=etp, **attention)

    def name(self, expected: str) -> bool:
        if self.peek() != "[":
            return False
        self.at += 1
        self.take(expected)
        self.take("]")
        return True

    def dims(self, allowed: str, words: str, starred: bool = True) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        while self.tokens[self.at][0] == "word" or not found:
            kind, letter, _ = self.tokens[self.at]
            if kind != "word" or len(letter) != 1 or letter not in allowed:
                self.fail(f"{letter or 'the end'!r} is no dimension: {words}")
            if letter in found:
                self.fail(f"{letter} is given twice")
            self.at += 1
            found[letter] = self.size(letter, starred)
        return found

    def sizes(self, allowed: str, words: str) -> dict[str, int]:
        return {
            letter: size
            for letter, size in self.dims(allowed, words, starred=False).items()
            if size is not None
        }

    def size(self, letter: str, starred: bool) -> int | None:
        kind, text, _ = self.tokens[self.at]
        if text == "*" and letter == "d" and starred:
            self.at += 1
            return None
        if kind != "number":
            self.fail(
                f"{letter} needs a number" + (", or * for what is left" if letter == "d" and starred else "")
            )
        if text.startswith("0"):
            self.fail(f"{letter}{text}: a number from 1, without leading zero")
        if len(text) > 9:
            self.fail(f"{letter} has {len(text)} digits")
        self.at += 1
        return int(text)
