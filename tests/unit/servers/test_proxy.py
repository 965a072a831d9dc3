"""The proxy in front of a backend of a few lines: who may, what is refused, what is added."""

import asyncio
import contextlib
import json
import threading
import time

import pytest
from patience import until

from hpc_rl.core.errors import ConfigError, RequestRefused, RoleFailed
from hpc_rl.core.net import bind
from hpc_rl.core.trial import Trial, write_json
from hpc_rl.name_resolve import keys, open_names, shared_fs
from hpc_rl.servers import replica as replica_module
from hpc_rl.servers.client import (
    EXACT_HEADER,
    MIN_VERSION_HEADER,
    GenerateRequest,
    HttpServerClient,
    open_session,
)
from hpc_rl.servers.proxy import Proxy
from hpc_rl.servers.replica import Identity, Replica

pytestmark = pytest.mark.waits

TOKENS = {"control": "c" * 8, "data": "d" * 8}


class FakeBackend:
    receiver = None

    def __init__(self):
        self.calls, self.dead, self.started = [], "", None
        self.fail_updates = False
        self.stopped = False
        self.on_start = None

    async def start(self, path, version):
        self.started = (path, version)
        if self.on_start:
            self.on_start()

    async def request(self, path, body):
        self.calls.append((path, body))
        if path == "/update_weights_from_disk" and self.fail_updates:
            return 400, {"success": False, "message": "no"}
        return 200, {"path": path}

    def alive(self):
        return self.dead

    async def stop(self):
        self.stopped = True


@contextlib.asynccontextmanager
async def proxy_at(lifecycle="serving", version="0.3"):
    proxy = Proxy(FakeBackend(), TOKENS, "7.1", 2)
    proxy.version, proxy.lifecycle, proxy.epoch = version, lifecycle, 5
    sock = bind("127.0.0.1")
    await proxy.serve(sock)
    async with open_session() as session:

        async def call(method, path, body=None, token="data", headers=()):
            auth = {"Authorization": f"Bearer {TOKENS.get(token, token)}"} if token else {}
            url = f"http://127.0.0.1:{sock.getsockname()[1]}{path}"
            async with session.request(method, url, json=body, headers={**auth, **dict(headers)}) as response:
                return response.status, json.loads(await response.read())

        yield proxy, call
    await proxy.close()


async def test_health_tells_who_and_which_weights():
    async with proxy_at() as (proxy, call):
        told = {"state": "serving", "epoch": 5, "weight_version": "0.3", "attempt": "7.1", "incarnation": 2}
        assert await call("GET", "/health") == (200, told)
        proxy.backend.dead = "killed"
        assert (await call("GET", "/health"))[0] == 503


async def test_it_counts_for_how_long_it_had_requests():
    async with proxy_at() as (proxy, call):
        answered, answer = asyncio.Event(), proxy.backend.request

        async def slow(path, body):
            await answered.wait()
            return await answer(path, body)

        proxy.backend.request = slow
        begun = time.monotonic()
        both = [asyncio.create_task(call("POST", "/generate", {"input_ids": [1]})) for _ in range(2)]
        while proxy.busy_s < 0.2:
            await asyncio.sleep(0.01)
        answered.set()
        await asyncio.gather(*both)
        total = proxy.busy_s
        assert 0.2 <= total <= time.monotonic() - begun  # once, although there were two
        await asyncio.sleep(0.05)
        assert proxy.busy_s == total


@pytest.mark.parametrize("lifecycle", ["starting", "loading", "waiting", "stale", "stopping"])
async def test_generates_only_while_serving(lifecycle):
    async with proxy_at(lifecycle) as (proxy, call):
        status, answer = await call("POST", "/generate", {"input_ids": [1]})
        assert status == 503 and lifecycle in answer["error"]["message"]
        assert proxy.backend.calls == []


async def test_a_channel_needs_the_data_token():
    async with proxy_at() as (proxy, _call), open_session() as session:
        url = f"http://127.0.0.1:{proxy._service._listener.getsockname()[1]}"
        request = GenerateRequest([1], {"max_new_tokens": 1}, "r")
        for token in ("wrong", ""):
            with pytest.raises(RequestRefused, match="401"):
                await HttpServerClient(session, url, token).generate_many([request])
        assert proxy.backend.calls == []


async def test_wrong_tokens_reach_nothing():
    async with proxy_at() as (proxy, call):
        for token in (None, "wrong", ""):
            assert (await call("POST", "/generate", {}, token))[0] == 401
            assert (await call("GET", "/health", None, token))[0] == 401
        for path in (
            "/pause_generation",
            "/continue_generation",
            "/abort_request",
            "/update_weights_from_disk",
            "/switch_weights",
            "/init_weights_update_group",
            "/destroy_weights_update_group",
            *GROUP_CALLS,
            "/shutdown",
        ):
            assert (await call("POST", path, {}, "data"))[0] == 401
        assert proxy.backend.calls == []


SWITCH = ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


async def test_a_switch_of_weights_pauses_loads_and_continues():
    async with proxy_at(version="0.3") as (proxy, call):
        body = {"model_path": "/w", "weight_version": "0.4", "pause_mode": "abort"}
        status, answer = await call("POST", "/switch_weights", body, "control")
        assert (status, answer["weight_version"], answer["paused_s"] > 0) == (200, "0.4", True)
        assert [path for path, _ in proxy.backend.calls] == SWITCH
        assert proxy.backend.calls[0][1] == {"mode": "abort"} and proxy.state == "serving"


async def test_a_switch_that_fails_continues_with_the_old_weights():
    async with proxy_at(version="0.3") as (proxy, call):
        proxy.backend.fail_updates = True
        body = {"model_path": "/w", "weight_version": "0.4", "pause_mode": "retract"}
        assert (await call("POST", "/switch_weights", body, "control"))[0] == 400
        assert [path for path, _ in proxy.backend.calls] == SWITCH
        assert (proxy.version, proxy.state) == ("0.3", "serving")
        proxy.backend.calls.clear()
        older = {"weight_version": "0.2"}, {"pause_mode": "in_place", "flush_cache": True}
        for wrong in older:
            status, answer = await call("POST", "/switch_weights", {**body, **wrong}, "control")
            assert status == 400 and ("older" in answer["message"] or "cache" in answer["message"])
        assert proxy.backend.calls == []  # nothing was paused


async def test_a_switch_that_leaves_a_mixture_stays_paused():
    async with proxy_at(version="0.3") as (proxy, call):
        await call("POST", "/pause_generation", {"mode": "retract"}, "control")
        await call("POST", "/begin_weight_update", {"weight_version": "0.4"}, "control")
        proxy.backend.fail_updates = True
        body = {"model_path": "/w", "weight_version": "0.5", "pause_mode": "retract"}
        assert (await call("POST", "/switch_weights", body, "control"))[0] == 400
        assert proxy.state == "paused" and proxy.backend.calls[-1][0] == "/update_weights_from_disk"
        proxy.backend.fail_updates = False
        assert (await call("POST", "/switch_weights", body, "control"))[0] == 200
        assert proxy.state == "serving" and proxy.backend.calls[-1][0] == "/continue_generation"


async def test_min_version_is_compared_as_a_label():
    async with proxy_at(version="0.9") as (_, call):
        assert (await call("POST", "/generate", {}, headers={"X-Hpc-Rl-Min-Version": "0.9"}.items()))[
            0
        ] == 200
        refused = await call("POST", "/generate", {}, headers={"X-Hpc-Rl-Min-Version": "0.10"}.items())
        assert refused == (503, {"error": "stale", "weight_version": "0.9"})
        assert (await call("POST", "/generate", {}, headers={"X-Hpc-Rl-Min-Version": "nine"}.items()))[
            0
        ] == 400


GROUP_CALLS = ("/begin_weight_update", "/update_weights_from_distributed", "/end_weight_update")


async def test_weights_over_a_process_group_have_their_label_at_the_end():
    begin, receive, end = GROUP_CALLS
    async with proxy_at(version="0.3") as (proxy, call):

        async def control(path, **body):
            return (await call("POST", path, body, "control"))[0]

        assert await control(receive, weight_version="0.4") == 400  # nothing has begun
        assert await control(begin, weight_version="0.4") == 400  # not paused
        assert await control("/pause_generation", mode="retract") == 200
        for label in ("0.2", "0.3", "x", None):
            assert await control(begin, weight_version=label) == 400, label
        assert proxy.receiving == "" and [path for path, _ in proxy.backend.calls] == ["/pause_generation"]
        assert await control(begin, weight_version="0.4") == 200
        assert await control(receive, weight_version=None) == 200
        assert await control(end) == 400  # the last bucket is missing
        assert await control("/continue_generation") == 400
        assert await control(receive, weight_version="0.5") == 400  # another version
        assert (proxy.version, proxy.receiving) == ("0.3", "0.4")
        assert await control(receive, weight_version="0.4") == 200
        assert await control(receive, weight_version=None) == 400  # after the last one
        assert await control(end) == 200
        assert (proxy.version, proxy.receiving) == ("0.4", "")
        assert await control("/continue_generation") == 200 and proxy.state == "serving"


async def test_a_mixture_of_weights_ends_with_a_version_from_disk():
    async with proxy_at(version="0.3") as (proxy, call):

        async def control(path, **body):
            return (await call("POST", path, body, "control"))[0]

        await control("/pause_generation", mode="retract")
        await control("/begin_weight_update", weight_version="0.4")
        proxy.backend.fail_updates = True
        assert await control("/update_weights_from_disk", model_path="/p", weight_version="0.4") == 400
        assert await control("/continue_generation") == 400
        proxy.backend.fail_updates = False
        # also the version before: the label alone does not tell which weights are loaded
        assert await control("/update_weights_from_disk", model_path="/p", weight_version="0.3") == 200
        assert proxy.backend.calls[-1][0] == "/update_weights_from_disk"
        assert await control("/continue_generation") == 200
        assert (proxy.version, proxy.receiving) == ("0.3", "")


async def test_requests_that_are_paused_in_place_keep_their_cache():
    async with proxy_at(version="0.3") as (_, call):
        await call("POST", "/pause_generation", {"mode": "in_place"}, "control")
        await call("POST", "/begin_weight_update", {"weight_version": "0.4"}, "control")
        for flush, status in ((True, 400), (False, 200)):
            body = {"weight_version": "0.4", "flush_cache": flush}
            assert (await call("POST", "/update_weights_from_distributed", body, "control"))[0] == status


async def test_a_frozen_server_takes_no_weights_over_a_process_group():
    async with proxy_at() as (proxy, call):
        proxy.frozen = True
        for path in ("/init_weights_update_group", *GROUP_CALLS):
            body = {"weight_version": "0.4"}
            assert (await call("POST", path, body, "control"))[0] == 400
        assert proxy.backend.calls == []


async def test_the_same_label_loads_nothing_and_an_older_one_is_refused():
    async with proxy_at(version="1.3") as (proxy, call):
        body = {"model_path": "/p", "weight_version": "1.3"}
        assert (await call("POST", "/update_weights_from_disk", body, "control"))[0] == 200
        for label in ("1.2", "0.9", "x", None):
            refused = await call(
                "POST", "/update_weights_from_disk", {"model_path": "/p", "weight_version": label}, "control"
            )
            assert refused[0] == 400 and not refused[1]["success"]
        assert proxy.backend.calls == []


async def test_failed_update_keeps_the_version():
    async with proxy_at(version="0.3") as (proxy, call):
        proxy.backend.fail_updates = True
        status, _ = await call(
            "POST", "/update_weights_from_disk", {"model_path": "/p", "weight_version": "0.4"}, "control"
        )
        assert (status, proxy.version) == (400, "0.3")


async def test_first_update_makes_a_waiting_server_serve():
    async with proxy_at("waiting", "") as (proxy, call):
        await call("POST", "/pause_generation", {"mode": "retract"}, "control")
        await call(
            "POST", "/update_weights_from_disk", {"model_path": "/p", "weight_version": "0.0"}, "control"
        )
        assert proxy.state == "paused"
        await call("POST", "/continue_generation", {}, "control")
        assert (proxy.state, proxy.version) == ("serving", "0.0")


async def test_in_place_pause_refuses_an_update_that_flushes():
    async with proxy_at() as (_, call):
        await call("POST", "/pause_generation", {"mode": "in_place"}, "control")
        body = {"model_path": "/p", "weight_version": "0.4"}
        assert (await call("POST", "/update_weights_from_disk", body, "control"))[0] == 400
        assert (await call("POST", "/update_weights_from_disk", {**body, "flush_cache": False}, "control"))[
            0
        ] == 200


# the replica around it
@pytest.fixture
def trial(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_fs, "HEARTBEATS_PER_TTL", 600)
    monkeypatch.setattr(replica_module, "FOLLOW_S", 0.05)
    monkeypatch.setattr(replica_module, "SELF_LOAD_AFTER_S", 0.3)
    trial = Trial(tmp_path / "trial")
    trial.make_dirs()
    return trial


def publish(trial, label):
    write_json(
        trial.current_weights,
        {"label": label, "path": f"/weights/{label}", "lineage": 0, "step": int(label[2:])},
    )


def start(trial, backend, names, incarnation=0):
    stopping = threading.Event()
    replica = Replica(backend, trial, names, TOKENS, Identity(0, "7.1", incarnation), "/base")
    return replica, stopping, asyncio.create_task(replica.run(stopping))


def lease(names):
    return names.list_leases(keys.servers("rollout"))[keys.server("rollout", 0)].value


async def test_a_held_server_stays_at_its_version_until_it_is_released():
    async with proxy_at() as (proxy, call):
        hold = {"model_path": "/weights/0.3", "weight_version": "0.3"}
        assert (await call("POST", "/hold_weights", hold, "control"))[0] == 200
        assert proxy.backend.calls == [], "it has them already"
        newer = {"model_path": "/weights/0.4", "weight_version": "0.4", "pause_mode": "retract"}
        for path in ("/switch_weights", "/update_weights_from_disk"):
            status, answer = await call("POST", path, newer, "control")
            assert status == 400 and "stays at weights 0.3" in answer["message"]
        exact = {MIN_VERSION_HEADER: "0.2", EXACT_HEADER: "1"}
        assert (await call("POST", "/generate", {"input_ids": [1]}, headers=exact))[0] == 503
        exact[MIN_VERSION_HEADER] = "0.3"
        assert (await call("POST", "/generate", {"input_ids": [1]}, headers=exact))[0] == 200
        assert (await call("POST", "/hold_weights", {"weight_version": ""}, "control"))[0] == 200
        assert (await call("POST", "/switch_weights", newer, "control"))[0] == 200 and proxy.version == "0.4"


async def test_a_server_that_is_held_loads_an_older_version_or_stays_free():
    async with proxy_at() as (proxy, call):
        hold = {"model_path": "/weights/0.1", "weight_version": "0.1"}
        proxy.backend.fail_updates = True
        assert (await call("POST", "/hold_weights", hold, "control"))[0] == 400
        assert (proxy.held, proxy.version) == ("", "0.3")
        proxy.backend.fail_updates = False
        assert (await call("POST", "/hold_weights", hold, "control"))[0] == 200
        assert (proxy.held, proxy.version) == ("0.1", "0.1")
        assert ("/pause_generation", {"mode": "abort"}) in proxy.backend.calls


async def test_a_server_named_in_the_record_stays_at_its_version_also_after_a_restart(trial):
    publish(trial, "0.5")
    record = {"label": "0.3", "path": "/weights/0.3", "servers": ["server/rollout/0"]}
    write_json(trial.held_weights, record)
    names, backend = open_names(trial), FakeBackend()
    replica, stopping, task = start(trial, backend, names)
    await until(lambda: replica.proxy.state == "serving")
    assert backend.started == ("/weights/0.3", "0.3")
    await until(lambda: lease(names).get("held") == "0.3")
    trial.held_weights.unlink()  # the call that releases it was lost
    await until(lambda: replica.proxy.version == "0.5")
    assert "held" not in lease(names)
    write_json(trial.held_weights, record)
    await until(lambda: (replica.proxy.version, replica.proxy.held) == ("0.3", "0.3"))
    stopping.set()
    await task


async def test_a_server_for_evaluations_alone_ignores_what_is_published(trial):
    publish(trial, "0.5")
    names, backend, stopping = open_names(trial), FakeBackend(), threading.Event()
    who = Identity(4, "7.1", 0, "eval")
    replica = Replica(backend, trial, names, TOKENS, who, "/base", evaluates=True)
    task = asyncio.create_task(replica.run(stopping))
    await until(lambda: replica.proxy.state == "waiting")
    assert backend.started == ("/base", "")
    write_json(trial.held_weights, {"label": "0.4", "path": "/weights/0.4", "servers": []})
    await until(lambda: replica.proxy.version == replica.proxy.held == "0.4")
    stopping.set()
    await task


async def test_waits_for_weights_then_loads_them_by_itself_and_drains(trial):
    names, backend = open_names(trial), FakeBackend()
    replica, stopping, task = start(trial, backend, names)
    await until(lambda: replica.proxy.state == "waiting")
    assert backend.started == ("/base", "")
    publish(trial, "0.0")
    await until(lambda: replica.proxy.state == "serving")
    paths = [path for path, _ in backend.calls]
    assert paths == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]
    await until(lambda: lease(names)["version"] == "0.0" and lease(names)["state"] == "serving")
    stopping.set()
    assert await task == 75
    assert backend.stopped and not names.list_leases(keys.servers("rollout")).get(keys.server("rollout", 0))


async def test_a_frozen_server_serves_its_own_model_and_takes_no_weights(trial):
    publish(trial, "0.3")
    names, backend, stopping = open_names(trial), FakeBackend(), threading.Event()
    who = Identity(3, "7.1", 0, "student")
    replica = Replica(backend, trial, names, TOKENS, who, "/student", frozen=True)
    task = asyncio.create_task(replica.run(stopping))
    await until(lambda: replica.proxy.state == "serving")
    assert backend.started == ("/student", "")
    update = {"model_path": "/weights/0.4", "weight_version": "0.4"}
    status, answer = await replica.proxy.control("/update_weights_from_disk", update)
    assert status == 400 and "frozen" in answer["message"]
    publish(trial, "0.5")
    await asyncio.sleep(0.5)
    assert not [path for path, _ in backend.calls if path == "/update_weights_from_disk"]
    found = names.list_leases(keys.servers("student"))["server/student/3"].value
    assert (found["version"], found["state"]) == ("", "serving") and not names.list_leases(
        keys.servers("rollout")
    )
    stopping.set()
    assert await task == 75


async def test_a_frozen_server_that_can_not_start_says_why(trial):
    names, backend, who = open_names(trial), FakeBackend(), Identity(3, "7.1", 0, "student")

    def fail():
        raise ConfigError("no such program")

    backend.on_start = fail
    replica = Replica(backend, trial, names, TOKENS, who, "/student", frozen=True)
    with pytest.raises(ConfigError, match="/student can't be served: no such program"):
        await replica.run(threading.Event())
    assert backend.calls == [] and backend.stopped


async def test_starts_with_the_newest_published_weights(trial):
    publish(trial, "0.4")
    names, backend = open_names(trial), FakeBackend()
    replica, stopping, task = start(trial, backend, names)
    await until(lambda: replica.proxy.state == "serving")
    assert backend.started == ("/weights/0.4", "0.4") and backend.calls == []
    stopping.set()
    await task


async def test_weights_that_go_while_they_are_loaded_are_replaced_by_newer_ones(trial):
    publish(trial, "0.4")
    backend = FakeBackend()

    def gone():
        backend.on_start = None
        publish(trial, "0.6")
        raise FileNotFoundError("/weights/0.4")

    backend.on_start = gone
    replica, stopping, task = start(trial, backend, open_names(trial))
    await until(lambda: replica.proxy.state == "serving")
    assert backend.started == ("/weights/0.6", "0.6") and replica.proxy.version == "0.6"
    stopping.set()
    await task


@pytest.mark.parametrize(("published", "error"), [(True, RoleFailed), (False, ConfigError)])
async def test_a_bad_base_is_the_users_and_a_bad_publish_may_be_retried(trial, published, error):
    if published:
        publish(trial, "0.4")
    backend = FakeBackend()

    def bad():
        raise OSError("no config.json")

    backend.on_start = bad
    _, _, task = start(trial, backend, open_names(trial))
    with pytest.raises(error, match=r"no config\.json"):
        await task


async def test_dead_backend_ends_the_role(trial):
    publish(trial, "0.4")
    backend = FakeBackend()
    replica, _, task = start(trial, backend, open_names(trial))
    await until(lambda: replica.proxy.state == "serving")
    backend.dead = "signal SIGKILL"
    with pytest.raises(RoleFailed, match="SIGKILL"):
        await task


async def test_successor_makes_the_predecessor_stale(trial):
    publish(trial, "0.4")
    old, _, old_task = start(trial, FakeBackend(), open_names(trial))
    await until(lambda: old.proxy.state == "serving")
    names = open_names(trial)
    new, stopping, new_task = start(trial, FakeBackend(), names, 1)
    with pytest.raises(RoleFailed, match="another process now runs server 0"):
        await old_task
    assert new.proxy.epoch > old.proxy.epoch
    await until(lambda: new.proxy.state == "serving")
    assert lease(names)["incarnation"] == 1
    stopping.set()
    await new_task
