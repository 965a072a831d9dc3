"""The allocation grammar: AReaL's vectors, our additions, refusals with a position, and the round trip of the
canonical form.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpc_rl.core.allocation import POOL_NAME, Allocation, Servers, Train, parse
from hpc_rl.core.errors import ConfigError

MIXED = "megatron:(attn:d4p2t2c2|ffn:d2t4p2e2)"


@pytest.mark.parametrize(
    ("text", "canonical", "server_units", "train_units"),
    [
        ("sglang:d4t2+fsdp:d8", "sglang:d4t2+fsdp:d8", 8, 8),
        ("sglang.d4p1t1+d2c1t4", "sglang:d4+fsdp:d2t4", 4, 8),
        ("sglang:d4t4+attn:d4p2t2c2|ffn:d2p2t4e2", f"sglang:d4t4+{MIXED}", 16, 32),
        ("vllm:d2t4|megatron:d2t2p2", "vllm:d2t4|megatron:d2p2t2", 8, 8),
        ("sglang:d2t4|(attn:d1p1t8c1|ffn:d1p1t1e8)", "sglang:d2t4|megatron:(attn:t8|ffn:d1t1p1e8)", 8, 8),
        ("d4t2p1", "fsdp:d4t2", None, 8),
        ("e8d8", "megatron:d8e8", None, 8),
        ("d2p2t4e2c4", "megatron:d2p2t4c4e2", None, 64),
        ("(attn:d4p2t2c2|ffn:d2p2t4e2)", MIXED, None, 32),
        ("sglang.d4p1t1+eval", "sglang:d4+eval", 4, None),
        ("sglang:d4t2 + cpu", "sglang:d4t2+eval", 8, None),
        (" embedded : d2 + fsdp : d 3 ", "embedded:d2+fsdp:d3", 2, 3),
        ("embedded:d1+fsdp:d1", "embedded:d1+fsdp:d1", 1, 1),
        ("sglang[rollout]:d2+fsdp[actor]:d4", "sglang:d2+fsdp:d4", 2, 4),
        ("sglang:d2t2", "sglang:d2t2", 4, None),
        ("vllm[teacher]:d1t2 + vllm[s-2]:d3+fsdp:d2", "vllm[teacher]:t2+vllm[s-2]:d3+fsdp:d2", 5, 2),
        ("sglang:d1+sglang[judge]:t4+fsdp:d3", "sglang:d1+sglang[judge]:t4+fsdp:d3", 5, 3),
        ("embedded[a]:d1+embedded[b]:d1+eval", "embedded[a]:d1+embedded[b]:d1+eval", 2, None),
    ],
)
def test_vectors(text, canonical, server_units, train_units):
    allocation = parse(text)
    assert str(allocation) == canonical
    assert parse(canonical) == allocation
    assert (sum(pool.num_units for pool in allocation.pools) if allocation.pools else None) == server_units
    assert (allocation.train.num_units if allocation.train else None) == train_units


@pytest.mark.parametrize(
    ("text", "split"), [("e8d8", (1, 1)), ("d2p2t4e2c4", (4, 4)), ("(attn:d4p2t2c2|ffn:d2p2t4e2)", (4, 2))]
)
def test_experts(text, split):
    train = parse(text).train
    assert (train.etp, train.edp) == split


def test_star_is_what_is_left():
    servers = Servers("sglang", d=None, t=2)
    assert parse("sglang:d*t2+fsdp:d4") == Allocation(pools=(servers,), train=Train("fsdp", d=4))
    assert str(parse("sglang:d*+fsdp:d4")) == "sglang:d*+fsdp:d4"


@pytest.mark.parametrize(
    ("text", "position", "words"),
    [
        ("vllm:d2t4|megatron:d2t4p2", 10, "servers have 8 and training has 16"),
        ("(attn:d2p2t1c4|ffn:d2p4t1e2)", 1, "ffn p 4 must equal attn p 2"),
        ("sglang:d4+mgatron:d4", 11, "'mgatron' is not a valid backend; did you mean megatron?"),
        ("(attn:d4t2|ffn:d8t1e1)", 1, "ffn t 1 needs an e above 1; without, it must equal attn t 2"),
        ("(attn:d4p2t1c1|ffn:d2p2t2e2)", 1, "attn has 8 ranks, ffn has 16"),
        ("d4e3", 1, "4 ranks can't be divided"),
        ("sglang:d4c2+d4", 10, "'c' is not a valid dimension"),
        ("d04", 2, "leading zero"),
        ("d0", 2, "number of at least 1"),
        ("", 1, "empty"),
        ("sglang:d2@fsdp:d2", 10, "unexpected '@'"),
        ("fsdp:p2", 6, "fsdp has no p"),
        ("fsdp:d2e2", 6, "fsdp has no e"),
        ("d2d3", 3, "d is given twice"),
        ("(attn:d2|ffn:d2", 16, "expected ')'"),
        ("attn:d2|ffn:d2)", 15, "unexpected ')'"),
        ("fsdp:attn:d2|ffn:d2", 6, "fsdp has no attn|ffn form"),
        ("SGLang:d1+d1", 1, "did you mean sglang?"),
        ("embedded:d1t2+d1", 1, "embedded servers have d only"),
        ("sglang:d+d1", 9, "d needs a number"),
        ("sglang:t*+d1", 9, "t needs a number"),
        ("fsdp[critic]:d1", 6, "expected 'actor'"),
        ("sglang:d1+sglang:d1+fsdp:d1", 11, "the pool rollout appears twice; name each"),
        ("sglang[a]:d1+vllm[a]:d1+fsdp:d1", 14, "the pool a appears twice"),
        ("sglang[]:d1+d1", 8, "'' can't name a pool"),
        ("sglang[1b]:d1+d1", 8, "'1b' can't name a pool"),
        ("sglang[a b]:d1+d1", 8, "'a b' can't name a pool"),
        (f"sglang[{'a' * 64}]:d1+d1", 8, "use a letter, then up to 62 letters, digits, _ or -"),
        ("sglang[a:d1+d1", 8, "can't name a pool"),
        ("sglang[a]:d1+sglang[b]:d1|d2", 26, "several pools"),
        ("sglang:d4+fsdp:d4+eval", 18, "name their pool, as sglang:d3+sglang[eval]:d1+fsdp:d4"),
        ("sglang:d4+eval+fsdp:d4", 15, "name their pool, as sglang:d3+sglang[eval]:d1+fsdp:d4"),
    ],
)
def test_refusals_name_the_position(text, position, words):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert f"character {position}: " in str(caught.value)
    assert words in str(caught.value)


@pytest.mark.parametrize("word", ["manual", "heuristic"])
def test_words_of_the_old_help_text(word):
    with pytest.raises(ConfigError, match="leave it empty"):
        parse(word)


SIZE = st.integers(1, 9)
NAMES = st.from_regex(POOL_NAME, fullmatch=True)
SERVERS = st.builds(
    Servers, st.sampled_from(["sglang", "vllm"]), d=st.none() | SIZE, t=SIZE, p=SIZE, pool=NAMES
)
POOLS = st.lists(SERVERS, max_size=3, unique_by=lambda servers: servers.pool)
FSDP = st.builds(Train, st.just("fsdp"), d=st.none() | SIZE, t=SIZE, c=SIZE)


@st.composite
def expert_meshes(draw) -> Train:
    p, e, etp, edp, t, c = (draw(SIZE) for _ in range(6))
    experts, e = (e * etp * edp, e) if e > 1 else (draw(SIZE) * t * c, 1)
    d = experts * t * c  # then d * t * c is a multiple of e * etp
    return Train("megatron", d=d, p=p, t=t, c=c, e=e, etp=etp if e > 1 else 1)


@given(POOLS, FSDP | expert_meshes())
def test_round_trip(servers, train):
    allocation = Allocation(pools=tuple(servers), train=train)
    assert parse(str(allocation)) == allocation
    assert str(parse(str(allocation))) == str(allocation)


@given(st.text(alphabet="dtpce0123456789+|:.()* sglangfdpattnvm[]_-", max_size=24))
def test_any_text_is_parsed_or_refused_in_words(text):
    try:
        allocation = parse(text)
    except ConfigError as error:
        assert str(error)
    else:
        assert parse(str(allocation)) == allocation
