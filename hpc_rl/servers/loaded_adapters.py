"""The versions of an adapter that SGLang or vLLM has loaded, and the requests that use them.

Each version has its own name, and a request names the one that it begins with. So an update needs no
pause, no token is from another version than the label of its request, and no cache entry is used by another
version. The version before the newest stays, because a request may be about to name it.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hpc_rl.config.options.training import PPOActorConfig
from hpc_rl.config.rules.lora_rules import LAYERS
from hpc_rl.core import adapters
from hpc_rl.core.trial import load_object

NUM_AT_ONCE = 3  # adapters in one batch: the newest, the one before, and no adapter


def gets_adapters(actor: PPOActorConfig) -> bool:
    """Return whether servers of the actor get adapters alone."""
    return actor.use_lora and actor.lora_publish == "adapter" and not actor.is_critic


def list_layers(actor: PPOActorConfig) -> list[str]:
    """Return the layers that an adapter of the actor has; `all` for an unknown kind of model."""
    if actor.target_modules and adapters.ALL_LINEAR not in actor.target_modules:
        return list(actor.target_modules)
    content = load_object(Path(actor.path).expanduser() / "config.json")
    return list(LAYERS.get(str(content.get("model_type")), ("all",)))


def name_adapter(label: str) -> str:
    """Return the name in the server of the adapter of a version."""
    return f"policy-{label}"


class LoadedAdapters:
    """The adapters of one server by the labels of their versions, oldest first."""

    def __init__(self) -> None:
        self._labels: list[str] = []
        self._num_running: Counter[str] = Counter()

    def has(self, label: str | None) -> bool:
        """Return whether the weights with this label are an adapter."""
        return label in self._labels

    @contextmanager
    def use(self, label: str) -> Iterator[None]:
        """Keep a version loaded for a request."""
        self._num_running[label] += 1
        try:
            yield
        finally:
            self._num_running[label] -= 1

    def add(self, label: str) -> None:
        self._labels.append(label)

    def take_unused(self) -> list[str]:
        """Return the versions to unload, and forget them."""
        unused = [label for label in self._labels[:-2] if not self._num_running[label]]
        self._labels = [label for label in self._labels if label not in unused]
        return unused
