"""`allocation_mode`: how units (GPUs, or processes without one) are divided between servers and training.

    expression : servers "+" train | servers "|" train | servers "+" ("eval"|"cpu") | servers | train
    servers    : ("embedded"|"sglang"|"vllm") name? (":"|".") (("d"|"t"|"p") SIZE)+
    train      : (("fsdp"|"megatron") name? ":")? ((("d"|"p"|"t"|"c"|"e") SIZE)+ | hybrid)
    hybrid     : "("? "attn" ":" dims(c d t p) "|" "ffn" ":" dims(d e t p) ")"?
    name       : "[" ("rollout"|"actor") "]"          SIZE : a number without leading zero; "d*" is the rest

Blanks may stand between tokens; dimensions come in any order, those not given are 1. `e` adds no units.
The parser accepts the whole grammar; what this version can't start is refused by the plan.
"""

import difflib
import re
from dataclasses import dataclass
from typing import NoReturn

from hpc_rl.errors import ConfigError


@dataclass(frozen=True)
class ServerBackend:
    """A kind of generation server.

    Args:
        section: Section of the configuration with its options.
        implementation: `module:class` of its `hpc_rl.servers.base.Backend`; empty where there is none yet.
        dimensions: Dimensions that an expression may give.
        supported: Dimensions that can be above 1 today.
        on_gpus: Whether it can use GPUs.
    """

    section: str
    implementation: str = ""
    dimensions: str = "dtp"
    supported: str = "d"
    on_gpus: bool = True


@dataclass(frozen=True)
class TrainBackend:
    """A train engine."""

    dimensions: str  # that an expression may give
    implementation: str = ""  # `module:class` of its `hpc_rl.engines.base.Engine`; empty: it is only planned
    supported: str = ""  # dimensions that can be above 1 today


SERVER_BACKENDS: dict[str, ServerBackend] = {
    "embedded": ServerBackend(
        "embedded", "hpc_rl.servers.embedded.backend:EmbeddedBackend", dimensions="d", on_gpus=False
    ),
    "sglang": ServerBackend("sglang", "hpc_rl.servers.sglang:SGLangBackend", supported="dt"),
    "vllm": ServerBackend("vllm"),
}
TRAIN_BACKENDS: dict[str, TrainBackend] = {
    "fsdp": TrainBackend("dtc", "hpc_rl.engines.fsdp:FSDPEngine", supported="d"),
    "megatron": TrainBackend("dptce"),
}
_TOKEN = re.compile(r"\s*(?:([A-Za-z]+)|([0-9]+)|([:.+|()\[\]*]))")


def usual_server_backend(n_gpus_per_node: int) -> str:
    """Return the backend of a plan whose `allocation_mode` is empty."""
    return "sglang" if n_gpus_per_node else "embedded"


@dataclass(frozen=True)
class Servers:
    """`d` replicas (None: the rest) of t * p units each."""

    backend: str
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
    """A training mesh of d * p * t * c units; `d` None is the rest. Experts: e groups of etp tensor ranks."""

    backend: str
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
    """A parsed expression. `colocate`: both share units; `evaluate`: servers and an evaluation."""

    servers: Servers | None = None
    train: Train | None = None
    colocate: bool = False
    evaluate: bool = False

    def __str__(self) -> str:
        """Return the canonical form; parse reads it back to an equal object."""
        if self.evaluate:
            return f"{self.servers}+eval"
        return ("|" if self.colocate else "+").join(str(part) for part in (self.servers, self.train) if part)


def parse(text: str) -> Allocation:
    """Read an expression. Raises ConfigError with the position and the reason."""
    if text.strip() in ("manual", "heuristic"):
        raise ConfigError(
            f"allocation_mode {text.strip()} is not supported; leave it empty to have one derived."
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
                self.fail(f"unexpected {text[start]!r}", start)
            kind = ("word", "number", "sign")[match.lastindex - 1]
            self.tokens.append((kind, match.group(match.lastindex), match.start(match.lastindex)))
            position = match.end()
        self.tokens.append(("end", "", end))

    def fail(self, reason: str, position: int | None = None) -> NoReturn:
        where = self.tokens[self.at][2] if position is None else position
        shown = self.text if len(self.text) <= 200 else f"{self.text[:100]}…"
        end = "" if reason.endswith("?") else "."
        raise ConfigError(f"allocation_mode {shown!r}, character {where + 1}: {reason}{end}")

    def peek(self) -> str:
        return self.tokens[self.at][1]

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
        backends = [*SERVER_BACKENDS, *TRAIN_BACKENDS]
        if kind == "word" and len(word) > 1 and word not in (*backends, "attn"):
            near = difflib.get_close_matches(word.lower(), backends, n=1)
            hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(backends)}"
            self.fail(f"{word!r} is not a valid backend; {hint}")
        result = self._servers_first() if word in SERVER_BACKENDS else Allocation(train=self.train())
        if not self.done():
            self.fail(f"unexpected {self.peek()!r} after the end of the expression")
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
            self.fail(f"'|' requires the same units for both, but {both}", sign_at)
        return Allocation(servers=servers, train=train, colocate=sign == "|")

    def servers(self) -> Servers:
        start = self.tokens[self.at][2]
        backend = self.take(*SERVER_BACKENDS)
        named = self.name("rollout")
        self.take(*(":" if named else ":."))
        sizes = self.dims("dtp", f"{backend} servers have d, t and p")
        allowed = SERVER_BACKENDS[backend].dimensions
        if any(letter not in allowed and (size or 1) > 1 for letter, size in sizes.items()):
            self.fail(f"{backend} servers have {', '.join(allowed)} only, as {backend}:d4", start)
        return Servers(backend, **sizes)  # type: ignore[arg-type]

    def train(self) -> Train:
        backend = None
        if self.peek() in TRAIN_BACKENDS:
            backend = self.take(*TRAIN_BACKENDS)
            self.name("actor")
            self.take(":")
        start = self.tokens[self.at][2]
        if self.peek() in ("(", "attn"):
            if backend and "e" not in TRAIN_BACKENDS[backend].dimensions:
                self.fail(f"{backend} has no attn|ffn form; use megatron", start)
            return self.hybrid(start)
        sizes = self.dims("dptce", "training has d, p, t, c and e")
        used = {letter for letter, size in sizes.items() if (size or 1) > 1}
        able = [name for name, one in TRAIN_BACKENDS.items() if used <= set(one.dimensions)]
        backend = backend or able[0]
        if backend not in able:
            lacking = next(
                letter for letter in sizes if letter in used - set(TRAIN_BACKENDS[backend].dimensions)
            )
            self.fail(f"{backend} has no {lacking}; use {able[0]}", start)
        tensor, pipeline, experts = ((sizes.get(letter) or 1) for letter in "tpe")
        etp = tensor if experts > 1 else 1
        mesh = Train(backend, etp=etp, **sizes)  # type: ignore[arg-type]
        parts = pipeline * etp * experts
        if experts > 1 and mesh.num_units is not None and mesh.num_units % parts:
            self.fail(f"{mesh.num_units} units can't be split by p*t*e = {parts} for the experts", start)
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

    def dims(self, allowed: str, hint: str, starred: bool = True) -> dict[str, int | None]:
        found: dict[str, int | None] = {}
        while self.tokens[self.at][0] == "word" or not found:
            kind, letter, _ = self.tokens[self.at]
            if kind != "word" or len(letter) != 1 or letter not in allowed:
                self.fail(f"{letter or 'the end'!r} is not a valid dimension; {hint}")
            if letter in found:
                self.fail(f"{letter} is given twice")
            self.at += 1
            found[letter] = self.size(letter, starred)
        return found

    def sizes(self, allowed: str, hint: str) -> dict[str, int]:
        found = self.dims(allowed, hint, starred=False)
        return {letter: size for letter, size in found.items() if size is not None}

    def size(self, letter: str, starred: bool) -> int | None:
        kind, text, _ = self.tokens[self.at]
        if text == "*" and letter == "d" and starred:
            self.at += 1
            return None
        if kind != "number":
            rest = ", or * for the rest" if letter == "d" and starred else ""
            self.fail(f"{letter} needs a number{rest}")
        if text.startswith("0"):
            self.fail(f"{letter}{text}: expected a number of at least 1, without leading zero")
        if len(text) > 9:
            self.fail(f"{letter} has {len(text)} digits, at most 9 are allowed")
        self.at += 1
        return int(text)
