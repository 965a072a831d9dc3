"""Import-only stand-in for triton, which has no CPU wheel: kernels can be declared, never launched.

Any name below `triton` exists: lower-case names are modules that can also be called as decorators,
capitalised names are classes. Only what SGLang inspects is spelt out.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "3.0.0"


def _refuse(name):
    raise RuntimeError(f"triton stand-in: kernel {name} was launched on a CPU")


class _Kernel:
    def __init__(self, function):
        self.fn, self.__name__ = function, getattr(function, "__name__", "kernel")

    def __getitem__(self, _grid):
        return lambda *_args, **_kwargs: _refuse(self.__name__)

    def __call__(self, *_args, **_kwargs):
        _refuse(self.__name__)


class _Anything(types.ModuleType):
    def __init__(self, name):
        super().__init__(name)
        self.__path__, self.__file__ = [], __file__
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name):
        return _attribute(self, name)

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and callable(args[0]) and not kwargs:
            return args[0]
        return lambda function: function

    def __bool__(self):
        return False

    def __iter__(self):
        return iter(())


def _attribute(owner, name):
    if name.startswith("__"):
        raise AttributeError(name)
    full = f"{owner.__name__}.{name}"
    if name[:1].isupper():
        value = type(
            name, (), {"__module__": owner.__name__, "__init_subclass__": classmethod(lambda cls, **_: None)}
        )
    else:
        value = sys.modules.setdefault(full, _Anything(full))
    setattr(owner, name, value)
    return value


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return sys.modules.get(spec.name) or _Anything(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())


def jit(function=None, **_kwargs):
    return _Kernel(function) if function is not None else _Kernel


def autotune(*_args, **_kwargs):
    return lambda function: function


heuristics = autotune


def cdiv(a, b):
    return -(a // -b)


def next_power_of_2(n):
    return 1 << (n - 1).bit_length() if n > 0 else 1


class Config:
    def __init__(self, kwargs=None, num_warps=4, num_stages=2, **_extra):
        self.kwargs, self.num_warps, self.num_stages = kwargs or {}, num_warps, num_stages


def __getattr__(name):
    return _attribute(sys.modules[__name__], name)


for _name in ("compiler.compiler", "language", "runtime.autotuner", "runtime.cache"):
    importlib.import_module(f"triton.{_name}")
language = sys.modules["triton.language"]


class _Constexpr:
    def __init__(self, value=None):
        self.value = value


language.constexpr = _Constexpr
runtime, compiler = sys.modules["triton.runtime"], sys.modules["triton.compiler"]
runtime.autotuner.OutOfResources = type("OutOfResources", (Exception,), {})
runtime.autotuner.PTXASError = type("PTXASError", (Exception,), {})
runtime.cache.triton_key = compiler.compiler.triton_key = lambda: "triton-stand-in"
