"""Runs in every Python process that has this directory on PYTHONPATH: lets a CUDA build of torchvision load
beside a CPU torch.

Its compiled part can't load there, and its import then fails for two operators that do not exist. Declaring
them before torchvision is imported is enough; a +cpu build registers them itself.

SGLang's adapters ask for page-locked memory, which needs an accelerator: here they get ordinary memory.
"""

import importlib.metadata
import sys

_declared = []  # the library object must stay alive


class _BeforeTorchvision:
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision" and not _declared:
            _declared.append(None)
            if not importlib.metadata.version("torchvision").endswith("+cpu"):
                import torch

                library = torch.library.Library("torchvision", "DEF")
                for operator in ("nms", "qnms"):
                    library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                _declared.append(library)
        if name == "sglang.srt.lora.layers":
            _use_ordinary_memory()
        return None


def _use_ordinary_memory():
    import torch

    def make(function):
        def call(*args, pin_memory=False, **kwargs):
            return function(*args, **kwargs)

        return call

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, make(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *args: self


sys.meta_path.insert(0, _BeforeTorchvision())
