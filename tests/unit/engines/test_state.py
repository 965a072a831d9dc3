"""Recover state of parameters of any shape."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hpc_rl.config.options.training import OptimizerConfig
from hpc_rl.core import checked_file
from hpc_rl.core.errors import Damaged
from hpc_rl.engines.shared import state
from hpc_rl.engines.shared.mesh import Mesh
from hpc_rl.engines.shared.optimizer import Optimizer, Shard
from hpc_rl.engines.shared.pieces import Piece, StatePiece, split_flat


def part(values: dict[str, torch.Tensor]) -> tuple[list[Shard], Optimizer]:
    shards = []
    for name, value in values.items():
        parameter = nn.Parameter(value.clone())
        shards.append(Shard(name, parameter, parameter.data, tuple(value.shape), (0,) * value.ndim))
    return shards, Optimizer(OptimizerConfig(), shards)


def state_of(pieces: list[StatePiece], mesh: Mesh | None = None) -> state.RankState:
    shapes = {one.piece.name: one.piece.shape for one in pieces}
    return state.RankState(mesh or Mesh(), pieces, shapes)


def test_a_parameter_without_dimensions_comes_back(tmp_path):
    """As a learnt temperature or gate."""
    values = {"scale": torch.tensor(2.5), "w": torch.arange(6.0).reshape(3, 2)}
    shards, optimizer = part(values)
    for shard in shards:
        shard.parameter.grad = torch.ones_like(shard.local)
    optimizer.step(lr=0.1, grad_norm=1.0)
    files = state_of(optimizer.pieces()).take({"updates": 1}, None).write(tmp_path)
    loaded, its_optimizer = part({name: torch.zeros_like(value) for name, value in values.items()})
    counters = state_of(its_optimizer.pieces()).load(tmp_path, 1, {file.name: file for file in files})
    assert counters["updates"] == 1
    for one, other in zip(shards, loaded, strict=True):
        assert torch.equal(one.parameter, other.parameter)
        assert all(map(torch.equal, optimizer.moments[one.name], its_optimizer.moments[one.name]))
    model, _ = part({name: torch.zeros_like(value) for name, value in values.items()})
    weights = [StatePiece("model", shard.piece()) for shard in model]
    state_of(weights).load(tmp_path, 1, {file.name: file for file in files})
    assert torch.equal(model[0].parameter, shards[0].parameter)


WHOLE = {"w": torch.arange(60.0).reshape(6, 10), "e": torch.arange(60.0, 108.0).reshape(4, 3, 4)}
# layout -> per rank the rectangles (name, offset, shape) that it has
LAYOUTS = {
    "whole": [[("w", (0, 0), (6, 10)), ("e", (0, 0, 0), (4, 3, 4))]],
    "rows": [
        [("w", (0, 0), (4, 10)), ("e", (0, 0, 0), (2, 3, 4))],
        [("w", (4, 0), (2, 10)), ("e", (2, 0, 0), (2, 3, 4))],
    ],
    "columns": [
        [("w", (0, 0), (6, 3)), ("e", (0, 0, 0), (4, 1, 4))],
        [("w", (0, 3), (6, 7)), ("e", (0, 1, 0), (4, 2, 4))],
    ],
    "interleaved": [
        [("w", (0, 0), (1, 10)), ("w", (2, 0), (1, 10)), ("w", (4, 0), (2, 5)), ("e", (0, 0, 0), (4, 3, 4))],
        [("w", (1, 0), (1, 10)), ("w", (3, 0), (1, 10)), ("w", (4, 5), (2, 5))],
    ],
}


def rank_of(layout: str, rank: int, fill: bool) -> tuple[state.RankState, list[StatePiece]]:
    pieces = []
    for name, offset, shape in LAYOUTS[layout][rank]:
        piece = Piece(name, torch.full(shape, -1.0), offset, tuple(WHOLE[name].shape))
        if fill:
            piece.local.copy_(WHOLE[name][piece.slices()])
        pieces.append(StatePiece("model", piece))
    mesh = Mesh(rank, len(LAYOUTS[layout]))
    return state.RankState(mesh, pieces, {name: tuple(one.shape) for name, one in WHOLE.items()}), pieces


@pytest.mark.parametrize("saved", LAYOUTS)
@pytest.mark.parametrize("loaded", LAYOUTS)
def test_a_state_saved_in_one_layout_is_loaded_in_another(tmp_path, saved, loaded):
    for rank in range(len(LAYOUTS[saved])):
        rank_of(saved, rank, fill=True)[0].take({"updates": 7}, None).write(tmp_path)
    for rank in range(len(LAYOUTS[loaded])):
        ours, pieces = rank_of(loaded, rank, fill=False)
        assert ours.load(tmp_path, len(LAYOUTS[saved]))["updates"] == 7
        for _, piece, _ in pieces:
            assert torch.equal(piece.local, WHOLE[piece.name][piece.slices()])


def test_numbers_that_no_rank_saved_are_missed(tmp_path):
    ours, pieces = rank_of("columns", 0, fill=True)
    dropped = state.RankState(ours.mesh, pieces[1:], ours.shapes)
    dropped.take({}, None).write(tmp_path)
    rank_of("columns", 1, fill=True)[0].take({}, None).write(tmp_path)
    with pytest.raises(Damaged, match="lacks values of the tensors w"):
        rank_of("rows", 0, fill=False)[0].load(tmp_path, 2)


def test_the_state_of_another_model_is_refused(tmp_path):
    ours, pieces = rank_of("whole", 0, fill=True)
    ours.take({}, None).write(tmp_path)
    odd = state.RankState(Mesh(), pieces, {"w": (6, 10), "e": (4, 3, 5)})
    with pytest.raises(ValueError, match=r"e has the shape .4, 3, 4., and .4, 3, 5. in the model"):
        odd.load(tmp_path, 1)
    fewer = state.RankState(Mesh(), pieces[:1], {"w": (6, 10)})
    with pytest.raises(ValueError, match="e has the shape"):
        fewer.load(tmp_path, 1)


@given(st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3)), st.data())
def test_a_flat_range_of_a_rectangle_is_cut_into_rectangles(shape, data):
    whole = torch.arange(float(4 * 4 * 3)).reshape(4, 4, 3)
    offset = tuple(
        data.draw(st.integers(0, most - size)) for most, size in zip((4, 4, 3), shape, strict=True)
    )
    rectangle = Piece("w", torch.empty(shape), offset, (4, 4, 3))
    flat = whole[rectangle.slices()].reshape(-1)
    start = data.draw(st.integers(0, len(flat)))
    end = data.draw(st.integers(start, len(flat)))
    pieces = list(split_flat(rectangle, start, flat[start:end]))
    assert sum(piece.local.numel() for piece in pieces) == end - start
    assert all(torch.equal(piece.local, whole[piece.slices()]) for piece in pieces)


def test_tensors_of_a_device_are_copied_to_cpu_memory_block_by_block(tmp_path, monkeypatch):
    values = {"w": torch.randn(60, 50), "scale": torch.tensor(2.5), "t": torch.randn(50, 60).T}
    pieces = part(values)[1].pieces()
    (tmp_path / "host").mkdir()
    (tmp_path / "device").mkdir()
    want = state_of(pieces).take({"updates": 1}, None).write(tmp_path / "host")
    sizes = list[int]()

    def copy_to(self, memory: memoryview) -> None:
        sizes.append(len(memory))
        torch.frombuffer(memory, dtype=torch.uint8).copy_(self.flat)

    monkeypatch.setattr(state, "_make_part", state.DeviceBytes.of)
    monkeypatch.setattr(state.DeviceBytes, "copy_to", copy_to)
    monkeypatch.setattr(checked_file, "BLOCK_BYTES", 8192)
    snapshot = state_of(pieces).take({"updates": 1}, None)
    assert not sizes  # nothing is copied before the file is written
    got = snapshot.write(tmp_path / "device")
    (one,), (other,) = want, got
    assert (tmp_path / "host" / one.name).read_bytes() == (tmp_path / "device" / other.name).read_bytes()
    assert max(sizes) <= 8192 < sum(sizes)
