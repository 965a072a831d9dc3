"""`allocation_mode`: how units (GPUs, or processes without one) are divided between servers and training.

    expression : pools "+" train | servers "|" train | pools "+" ("eval"|"cpu") | pools | train
    pools      : servers ("+" servers)*
    servers    : ("embedded"|"sglang"|"vllm") name? (":"|".") (("d"|"t"|"p") SIZE)+
    train      : (("fsdp"|"megatron") name? (":"|"."))? ((("d"|"p"|"t"|"c"|"e") SIZE)+ | hybrid)
    hybrid     : "("? "attn" ":" dims(c d t p) "|" "ffn" ":" dims(d e t p) ")"?
    name       : "[" NAME "]"        SIZE : a number without leading zero; "d*" is the rest, all with "|"

Blanks may stand between tokens. Dimensions come in any order and default to 1. `e` adds no units. Each pool
of servers has a unique name, `rollout` by default; training can only be named `actor`. The parser accepts the
whole grammar; the plan refuses allocations that this version can't start.
"""

import difflib
import math
import re
from dataclasses import dataclass
from typing import Any, NoReturn

from hpc_rl.core.backends import SERVER_BACKENDS, TRAIN_BACKENDS
from hpc_rl.core.errors import ConfigError
from hpc_rl.core.refusal import Kind, Refusal

OPTION = "allocation_mode"
DEFAULT_POOL = "rollout"
POOL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,62}")
# of servers that take turns with the trainer: a second batch can be begun while the last groups of the first
# one finish; a third only gets older
MAX_AHEAD_IN_TURNS = 1
POOL_NAME_WORDS = "a letter, then up to 62 letters, digits, _ or -"


@dataclass(frozen=True)
class Servers:
    """A pool: `d` replicas (None: the rest) of t * p units each."""

    backend: str
    d: int | None = 1
    t: int = 1
    p: int = 1
    pool: str = DEFAULT_POOL

    @property
    def units_per_replica(self) -> int:
        return self.t * self.p

    @property
    def num_units(self) -> int | None:
        return None if self.d is None else self.d * self.units_per_replica

    def __str__(self) -> str:
        name = "" if self.pool == DEFAULT_POOL else f"[{self.pool}]"
        return f"{self.backend}{name}:{_format_dims(d=self.d, t=self.t, p=self.p)}"


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
    def multiple(self) -> int:
        """The number of units must be a multiple of this."""
        return math.lcm(self.units_per_replica, self.p * self.e * self.etp)

    @property
    def is_hybrid(self) -> bool:
        """Whether the experts use another tensor parallel size than the attention."""
        return self.e > 1 and self.etp != self.t

    @property
    def edp(self) -> int | None:
        """Data parallel size of the experts; d without experts."""
        if self.e == 1 or self.num_units is None:
            return self.d
        return self.num_units // (self.p * self.etp * self.e)

    def __str__(self) -> str:
        if not self.is_hybrid:
            return f"{self.backend}:{_format_dims(d=self.d, p=self.p, t=self.t, c=self.c, e=self.e)}"
        attention = _format_dims(d=self.d, p=self.p, t=self.t, c=self.c)
        experts = f"d{self.edp}t{self.etp}p{self.p}e{self.e}"  # all four: a missing one would be inherited
        return f"{self.backend}:(attn:{attention}|ffn:{experts})"


@dataclass(frozen=True)
class Allocation:
    """A parsed expression. `colocate`: both share units; `evaluate`: servers and an evaluation."""

    pools: tuple[Servers, ...] = ()
    train: Train | None = None
    colocate: bool = False
    evaluate: bool = False

    def __str__(self) -> str:
        """Return the canonical form; `parse` turns it back into an equal object."""
        parts = [*map(str, self.pools), *(["eval"] if self.evaluate else [])]
        parts += [str(self.train)] if self.train else []
        return ("|" if self.colocate else "+").join(parts)


def parse(text: str, engine: str = "") -> Allocation:
    """Parse an expression; `engine` trains if the expression names none and the dimensions allow it.

    Raises ConfigError with the position and the reason.
    """
    if text.strip() in ("manual", "heuristic"):
        why, use = "is not supported", "leave it empty, and hpc-rl chooses the allocation"
        raise ConfigError(Refusal(option=OPTION, value=text.strip(), kind=Kind.UNSUPPORTED, why=why, use=use))
    return _Parser(text, engine).parse_expression()


def _format_dims(**sizes: int | None) -> str:
    shown = "".join(f"{name}{'*' if size is None else size}" for name, size in sizes.items() if size != 1)
    return shown or "d1"


class _Parser:
    """Recursive descent over (token, position); `self.at` is the number of the next token, "" ends them."""

    def __init__(self, text: str, engine: str) -> None:
        self.text, self.at, self.engine = text, 0, engine
        self.tokens = [(found[0], found.start()) for found in re.finditer(r"[A-Za-z]+|[0-9]+|\S", text)]
        self.tokens.append(("", len(text.rstrip())))
        if wrong := re.search(r"[^A-Za-z0-9:.+|()\[\]*\s_-]", text):
            self.fail(f"unexpected {wrong[0]!r}", wrong.start())

    @property
    def token(self) -> str:
        return self.tokens[self.at][0]

    @property
    def position(self) -> int:
        return self.tokens[self.at][1]

    def fail(self, reason: str, position: int | None = None) -> NoReturn:
        where = self.position if position is None else position
        shown = self.text if len(self.text) <= 200 else f"{self.text[:100]}…"
        why = f", character {where + 1}: {reason}"
        raise ConfigError(Refusal(option=OPTION, value=repr(shown), kind=Kind.VALUE, why=why))

    def skip(self, token: str) -> bool:
        """Take the next token if it is this one; return whether it was."""
        is_next = self.token == token
        self.at += is_next
        return is_next

    def take(self, *allowed: str) -> str:
        token = self.token
        if token not in allowed:
            found = repr(token) if token else "the end"
            self.fail(f"expected {' or '.join(map(repr, allowed))}, found {found}")
        self.at += 1
        return token

    def parse_expression(self) -> Allocation:
        word = self.token
        if not word:
            self.fail("the expression is empty")
        backends = [*SERVER_BACKENDS, *TRAIN_BACKENDS]
        if word.isalpha() and len(word) > 1 and word not in (*backends, "attn"):
            self.fail_unknown(word, backends)
        result = (
            self.parse_servers_first() if word in SERVER_BACKENDS else Allocation(train=self.parse_train())
        )
        if self.token == "+" and "eval" in (self.tokens[self.at - 1][0], self.tokens[self.at + 1][0]):
            use = "name their pool, as sglang:d3+sglang[eval]:d1+fsdp:d4"
            self.fail(f"'+eval' has no number of servers for evaluation beside training; {use}")
        if self.token:
            self.fail(f"unexpected {self.token!r} after the end of the expression")
        return result

    def fail_unknown(self, word: str, backends: list[str]) -> NoReturn:
        near = difflib.get_close_matches(word.lower(), backends, n=1)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(backends)}"
        self.fail(f"{word!r} is not a valid backend; {hint}")

    def parse_servers_first(self) -> Allocation:
        pools, sign, sign_at = [self.parse_servers()], "", self.position
        while self.token:
            sign_at, name_at = self.position, self.position + 1
            sign = self.take("+", "|")
            if sign == "|" or self.token not in SERVER_BACKENDS:
                break
            pools.append(self.parse_servers())
            if pools[-1].pool in [one.pool for one in pools[:-1]]:
                self.fail(
                    f"the pool {pools[-1].pool} appears twice; name each pool, as sglang[student]:d1", name_at
                )
            sign = ""
        if not sign:
            return Allocation(pools=tuple(pools))
        if sign == "+" and (self.skip("eval") or self.skip("cpu")):
            return Allocation(pools=tuple(pools), evaluate=True)
        train = self.parse_train()
        if sign == "|" and len(pools) > 1:
            self.fail("'|' can't be used with several pools of servers", sign_at)
        ours, theirs = pools[0].num_units, train.num_units
        if sign == "|" and ours and theirs and ours != theirs:
            both = f"servers have {ours} and training has {theirs}"
            self.fail(f"'|' needs as many GPUs for servers as for training, but {both}", sign_at)
        return Allocation(pools=tuple(pools), train=train, colocate=sign == "|")

    def parse_servers(self) -> Servers:
        start = self.position
        backend = self.take(*SERVER_BACKENDS)
        pool = self.parse_pool_name()
        self.take(*(":" if pool else ":."))
        sizes = self.parse_dims(f"{backend} servers have", "dtp")
        allowed = SERVER_BACKENDS[backend].dimensions
        if any(letter not in allowed and (size or 1) > 1 for letter, size in sizes.items()):
            self.fail(f"{backend} servers have {', '.join(allowed)} only, as {backend}:d4", start)
        return Servers(backend, **sizes, pool=pool or DEFAULT_POOL)

    def parse_pool_name(self) -> str:
        """Take the name of a pool in brackets; return an empty text without brackets."""
        if not self.skip("["):
            return ""
        start = self.position
        while self.token not in ("]", ""):
            self.at += 1
        name = self.text[start : self.position].strip()
        if not POOL_NAME.fullmatch(name):
            self.fail(f"{name!r} can't name a pool; use {POOL_NAME_WORDS}", start)
        self.take("]")
        return name

    def parse_train(self) -> Train:
        backend = None
        if self.token in TRAIN_BACKENDS:
            backend = self.take(*TRAIN_BACKENDS)
            if self.skip("["):
                self.take("actor")
                self.take("]")
            self.take(":", ".")
        elif self.token.isalpha() and self.tokens[self.at + 1][0] == ":" and self.token != "attn":
            self.fail_unknown(self.token, [*SERVER_BACKENDS, *TRAIN_BACKENDS])
        start = self.position
        if self.token in ("(", "attn"):
            if backend and "e" not in TRAIN_BACKENDS[backend].dimensions:
                self.fail(f"{backend} has no attn|ffn form; use megatron", start)
            return self.parse_hybrid(start)
        sizes = self.parse_dims("training has", "dptce")
        used = [letter for letter, size in sizes.items() if (size or 1) > 1]
        able = [name for name, one in TRAIN_BACKENDS.items() if set(used) <= set(one.dimensions)]
        backend = backend or (self.engine if self.engine in able else able[0])
        if backend not in able:
            lacking = next(letter for letter in used if letter not in TRAIN_BACKENDS[backend].dimensions)
            self.fail(f"{backend} has no {lacking}; use {able[0]}", start)
        tensor, pipeline, experts = (sizes.get(letter, 1) for letter in "tpe")
        mesh = Train(backend, etp=tensor if experts > 1 else 1, **sizes)
        parts = pipeline * tensor * experts
        if experts > 1 and mesh.num_units is not None and mesh.num_units % parts:
            self.fail(f"{mesh.num_units} ranks can't be divided by p*t*e = {parts} of the experts", start)
        return mesh

    def parse_hybrid(self, start: int) -> Train:
        is_open = self.skip("(")
        self.take("attn")
        self.take(":")
        attention = {"d": 1, "p": 1, "t": 1, "c": 1} | self.parse_dims("attn has", "cdtp", starred=False)
        self.take("|")
        self.take("ffn")
        self.take(":")
        inherited = {key: attention[key] for key in "dtp"}
        experts = inherited | {"e": 1} | self.parse_dims("ffn has", "detp", starred=False)
        if is_open:
            self.take(")")
        if experts["p"] != attention["p"]:
            self.fail(f"ffn p {experts['p']} must equal attn p {attention['p']}", start)
        units, expert_units = math.prod(attention.values()), math.prod(experts.values())
        if units != expert_units:
            self.fail(f"attn has {units} ranks, ffn has {expert_units}; these numbers must be equal", start)
        if experts["e"] == 1 and experts["t"] != attention["t"]:
            needs = f"needs an e above 1; without, it must equal attn t {attention['t']}"
            self.fail(f"ffn t {experts['t']} {needs}", start)
        etp = experts["t"] if experts["e"] > 1 else 1
        return Train("megatron", e=experts["e"], etp=etp, **attention)

    def parse_dims(self, whose: str, allowed: str, starred: bool = True) -> dict[str, Any]:
        """Take dimensions with their sizes; None stands for `*`."""
        found: dict[str, int | None] = {}
        while self.token.isalpha() or not found:
            letter = self.token
            if len(letter) != 1 or letter not in allowed:
                hint = f"{whose} {', '.join(allowed[:-1])} and {allowed[-1]}"
                self.fail(f"{letter or 'the end'!r} is not a valid dimension; {hint}")
            if letter in found:
                self.fail(f"{letter} is given twice")
            self.at += 1
            found[letter] = self.parse_size(letter, starred and letter == "d")
        return found

    def parse_size(self, letter: str, starred: bool) -> int | None:
        if starred and self.skip("*"):
            return None
        text = self.token
        if not text.isdigit():
            self.fail(f"{letter} needs a number{', or * for the rest' if starred else ''}")
        if text.startswith("0"):
            self.fail(f"{letter}{text}: expected a number of at least 1, without leading zero")
        if len(text) > 9:
            self.fail(f"{letter} has {len(text)} digits, at most 9 are allowed")
        self.at += 1
        return int(text)
