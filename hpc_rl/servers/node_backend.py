"""A backend that loads weights from its node: from the node's copy of the model, which follows the trainer.

`/prepare_weights` brings the copy to a version while the backend generates; `/update_weights_from_disk` then
loads it from there. All replicas of a node share the copy. Checkpoints that are not published weights are
copied only with `cluster.local_dir`. An older version than the node's copy, for an evaluation, gets a copy of
its own while the backend loads it. If the replica spans nodes, its members do all this on the other nodes, at
the same paths.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

from hpc_rl.core.adapters import is_adapter
from hpc_rl.core.errors import Damaged, RoleFailed
from hpc_rl.core.node_copies import NodeCopies
from hpc_rl.core.types import WeightVersion
from hpc_rl.servers.base import Answer, Backend, Receiver
from hpc_rl.servers.client import DAMAGED_STATUS
from hpc_rl.servers.members import Members, gather_calls
from hpc_rl.servers.wire import SendParts, make_refusal
from hpc_rl.weight_files.model_copy import ModelCopy

logger = logging.getLogger(__name__)


@dataclass
class NodeBackend:
    """See Backend. `copy` is None for a frozen model."""

    backend: Backend
    copy: ModelCopy | None
    copies: NodeCopies
    base: str = ""  # path of the model that published adapters belong to
    members: Members | None = None  # of a replica that spans nodes

    @property
    def receiver(self) -> Receiver | None:
        return self.backend.receiver if self.copy is not None else None

    async def start(self, path: str, version: str) -> None:
        """Start the backend on a published version, or on the checkpoint at `path` if there is no version.

        Raises Damaged if the version can't be built from the published files.
        """
        if not version or self.copy is None:
            await self._start_checkpoint(path, version)
            return
        copy, _ = await self._prepare(version)
        with ExitStack() as held:
            held.callback(self._drop_older, copy)
            hold = copy.hold(WeightVersion.parse(version))
            model = await asyncio.to_thread(held.enter_context, hold)
            if not is_adapter(model):
                await self._start_everywhere(str(model), version, copy)
                return
            await self._start_checkpoint(self.base, "")
            async with self._held_by_members(copy, version):
                body = {"model_path": str(model), "weight_version": version}
                status, answer = await self.backend.request("/update_weights_from_disk", body)
            if status != 200:
                raise RoleFailed(f"the adapter of version {version} can't be loaded: {answer}")

    async def _start_checkpoint(self, path: str, version: str) -> None:
        with ExitStack() as held:
            own = await asyncio.to_thread(held.enter_context, self.copies.open_copy(path))
            await self._start_everywhere(own, version, None, path)

    async def _start_everywhere(
        self, path: str, version: str, copy: ModelCopy | None, shared_path: str = ""
    ) -> None:
        """Start the backend on `path`, and the members on their copies, or on the checkpoint `shared_path`.

        Raises RoleFailed if a member is lost meanwhile.
        """
        if not self.members:
            await self.backend.start(path, version)
            return
        await self.members.start(shared_path, copy, version)
        try:
            started = asyncio.ensure_future(self.backend.start(path, version))
            lost = asyncio.ensure_future(self.members.wait_for_loss())
            try:
                done, _ = await asyncio.wait({started, lost}, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                started.cancel()
                lost.cancel()
        finally:
            await self.members.release()

    @asynccontextmanager
    async def _held_by_members(self, copy: ModelCopy, version: str) -> AsyncIterator[None]:
        """Keep the copies of the other nodes as they are; then remove copies of an older version."""
        if not self.members:
            yield
            return
        try:
            await self.members.hold(copy, version)
            yield
        finally:
            await self.members.release(copy if copy is not self.copy else None)

    async def request(self, path: str, body: dict[str, Any] | None) -> Answer:
        if self.copy is None or path not in ("/prepare_weights", "/update_weights_from_disk"):
            return await self.backend.request(path, body)
        body = body or {}
        try:
            version = WeightVersion.parse(str(body.get("weight_version")))
            copy, num_bytes = await self._prepare(str(version))
            if path == "/prepare_weights":
                await self.backend.prepare_changes(self.copy.versions / str(version))
                return 200, {"success": True, "num_bytes": num_bytes}
            with ExitStack() as held:
                held.callback(self._drop_older, copy)
                model = await asyncio.to_thread(held.enter_context, copy.hold(version))
                async with self._held_by_members(copy, str(version)):
                    return await self.backend.request(path, {**body, "model_path": str(model)})
        except Damaged as error:
            return DAMAGED_STATUS, {"error": "damaged", "message": str(error)}
        except ValueError as error:
            return 400, make_refusal(str(error))
        except OSError as error:  # for example, no space on the node
            return 500, make_refusal(f"{type(error).__name__}: {error}")

    async def generate(self, body: dict[str, Any], send: SendParts) -> Answer:
        return await self.backend.generate(body, send)

    async def _prepare(self, label: str) -> tuple[ModelCopy, int]:
        """Bring a copy to a version; return the copy and the number of bytes read."""
        assert self.copy is not None
        version, start = WeightVersion.parse(label), time.monotonic()
        at = self.copy.find_version()
        copy = self.copy if at is None or at <= version else self._make_older()
        own = asyncio.ensure_future(asyncio.to_thread(copy.bring_to, version))
        await gather_calls(own, *([self.members.prepare(copy, label)] if self.members else []))
        num_bytes = own.result()
        if num_bytes:  # no other replica of the node has done it
            form = "the server has copied weights %s to %s: %.3f GB in %.1f s"
            logger.info(form, label, copy.model, num_bytes / 1e9, time.monotonic() - start)
        return copy, num_bytes

    def _make_older(self) -> ModelCopy:
        assert self.copy is not None
        folder = self.copy.folder.with_name(f"{self.copy.folder.name}-older-{os.getpid()}")
        return ModelCopy(folder, self.copy.versions)

    def _drop_older(self, copy: ModelCopy) -> None:
        if copy is not self.copy:
            shutil.rmtree(copy.folder, ignore_errors=True)

    def alive(self) -> str:
        return self.backend.alive() or (self.members.problem if self.members else "")

    async def stop(self) -> None:
        if self.members:
            await self.members.announce_stop()
        await self.backend.stop()
        if self.members:
            await self.members.close()
