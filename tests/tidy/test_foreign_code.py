"""Nothing that comes from outside can run code: no unpicklers, evaluators, archives or shells.

Each of these has been the way into a program of decod's kind. A message or file of a peer must
never reach one, and the surest way is that there is none. `ALLOWED` lists the exceptions.
"""

import ast
from collections.abc import Iterable, Iterator

import pytest

from tests.tidy.test_code import ROOT, parse, python_files, where

ALLOWED = {
    ("decod/system.py", "ctypes"): "calls mallopt, prctl and adjtimex of the C library",
    ("decod/insight/bugreport.py", "tarfile"): "writes an archive of its own texts; reads none",
    ("decod/config/__init__.py", "importlib.import_module"): "the names are in a table there",
    (
        "decod/lab/cli/plan_command.py",
        "importlib.import_module",
    ): "the name stands in the line before",
    ("scripts/gpu/stage.py", "torch.compile"): "what decod is compared with",
    ("scripts/gpu_check.py", "importlib.import_module"): "the names are in a table there",
    (
        "decod/cli/service_command.py",
        "os.execv",
    ): "journalctl, by its path, with a list of arguments",
    (
        "decod/optimizer/optimizer_ranks.py",
        "torch.distributed",
    ): "the script's own group; numbers alone",
    ("decod/optimizer/huggingface.py", "transformers"): "the script's own, which has a Trainer",
    (
        "decod/model/cut.py",
        "transformers",
    ): "its classes of known types, without weights; settings that fetch code are taken out",
    (
        "decod/cli/hub.py",
        "huggingface_hub",
    ): "fetches safetensors and texts alone, and compares their hashes",
    (
        "decod/daemon/hub_base.py",
        "huggingface_hub",
    ): "ranges of safetensors, which count if they have the manifest's hashes",
    ("scripts/architectures.py", "transformers"): "the names of its types",
    ("decod/worker/ranks/group.py", "torch.distributed"): "on loopback, own processes; numbers",
    ("decod/train/weight_shards.py", "torch.distributed"): "the same group; numbers",
    (
        "decod/data/template.py",
        "jinja2",
    ): "sandboxed, in a process that opens no file, with bounds of time, memory and output",
    ("decod/data/engine.py", "multiprocessing"): "the command's own processes, over pipes to them",
    ("decod/data/engine.py", "concurrent.futures.ProcessPoolExecutor"): "the same",
    ("decod/data/engine.py", "distributed"): "the operator's cluster, and only with --dask",
    ("scripts/fuzz_sim.py", "concurrent.futures.ProcessPoolExecutor"): "the script's processes",
    **dict.fromkeys(
        [
            ("scripts/mutants.py", "compile"),
            ("scripts/mutants.py", "importlib.import_module"),
            ("scripts/mutants.py", "importlib.machinery.SourceFileLoader"),
            ("scripts/mutants.py", "types.CodeType"),
        ],
        "this checkout's own code with one change",
    ),
    ("scripts/bench/averaging_gloo.py", "torch.distributed"): "on loopback, to compare with",
    ("scripts/bench/pipeline.py", "torch.distributed"): "on loopback, to compare with",
}
"""Path and construct, with the reason why nothing from outside gets there."""

MODULES = {
    # They unpickle, or evaluate what they read.
    *("jinja2", "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "jsonpickle"),
    *("dask", "distributed"),
    *("marshal", "shelve", "dbm", "yaml", "ruamel", "multiprocessing", "logging.config"),
    # They run code that they are given.
    *("code", "codeop", "runpy", "imp", "zipimport", "pty", "ctypes", "cffi"),
    # They follow paths or entities in what they read.
    *("tarfile", "zipfile", "xml", "lxml"),
    # They fetch code along with models and data, or run what peers send.
    *("transformers", "datasets", "diffusers", "huggingface_hub", "torch.hub"),
    *("torch.jit", "torch.package", "torch.distributed", "torch.utils.cpp_extension"),
}
"""Modules that must not be imported, nor be reached through others."""

FUNCTIONS = {
    *("torch.load", "torch.save", "torch.compile", "torch.serialization"),
    *("torch.ops.load_library", "torch.classes.load_library"),
    *("numpy.load", "numpy.save", "numpy.savez"),
    *("os.system", "os.popen", "os.execv", "os.execve", "os.execvp", "os.spawnv", "os.spawnvp"),
    *("subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("shutil.unpack_archive", "shutil.make_archive"),
    *("importlib.util.spec_from_file_location", "importlib.machinery.SourceFileLoader"),
    "concurrent.futures.ProcessPoolExecutor",
    *("types.CodeType", "types.FunctionType", "builtins.eval", "builtins.exec"),
}
"""Functions and classes of modules that may be imported."""

METHODS = {
    # Of any object, since its class can't be told from the source.
    *("load_state", "save_state", "from_pretrained", "read_pickle", "to_pickle"),
    *("recv_pyobj", "send_pyobj", "extractall", "all_gather_object", "broadcast_object_list"),
    *("__reduce__", "__reduce_ex__", "__setstate__"),
}

BUILTINS = {"eval", "exec", "compile", "__import__"}
ARGUMENTS = {"allow_pickle", "trust_remote_code", "shell"}
"""Keyword arguments that must be False, plainly."""
SHELLS = {"sh", "bash", "/bin/sh", "/bin/bash"}
OWN_MODULES = ("decod.",)


def names_in(tree: ast.Module) -> dict[str, str]:
    """What imported names stand for: `from torch import load as get` gives `get`: `torch.load`."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole, first = alias.name, alias.name.partition(".")[0]
                names[alias.asname or first] = whole if alias.asname else first
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return names


def dotted(node: ast.AST, names: dict[str, str]) -> str:
    """The full name of `a.b.c`, or of `getattr(a.b, "c")`; empty if it begins otherwise."""
    match node:
        case ast.Name(id=name):
            return names.get(name, name)
        case ast.Attribute(value=value, attr=attr):
            return f"{found}.{attr}" if (found := dotted(value, names)) else ""
        case ast.Call(func=ast.Name(id="getattr"), args=[value, ast.Constant(value=str(attr)), *_]):
            return f"{found}.{attr}" if (found := dotted(value, names)) else ""
    return ""


def is_in(name: str, among: set[str]) -> str:
    """The entry that `name` is, or that it is part of; empty if there is none."""
    parts = name.split(".")
    heads = (".".join(parts[:length]) for length in range(1, len(parts) + 1))
    return next((head for head in heads if head in among), "")


def is_own(argument: ast.expr) -> bool:
    """Whether the name of a module to import is plain, or begins with this package's."""
    match argument:
        case ast.Constant(value=str(name)):
            return not is_in(name, MODULES)
        case ast.JoinedStr(values=[ast.Constant(value=str(beginning)), *_]):
            return beginning.startswith(OWN_MODULES)
    return False


def _first(names: Iterable[str], among: set[str]) -> str:
    return next(filter(None, (is_in(name, among) for name in names)), "")


def danger_of_call(node: ast.Call, names: dict[str, str]) -> str:
    """Return which construct a call is; empty if it is none."""
    for keyword in node.keywords:
        plain = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        if keyword.arg in ARGUMENTS and not plain:
            return keyword.arg
    if isinstance(node.func, ast.Name) and node.func.id in BUILTINS - names.keys():
        return node.func.id
    if dotted(node.func, names) == "importlib.import_module":
        return "" if is_own(node.args[0]) else "importlib.import_module"
    return is_in(dotted(node, names), MODULES | FUNCTIONS)


def danger_of(node: ast.AST, names: dict[str, str]) -> str:
    """Return which construct a part of a program is; empty if it is none."""
    match node:
        case ast.Import(names=imported):
            return _first((each.name for each in imported), MODULES)
        case ast.ImportFrom(module=str(module), names=imported):
            return _first((f"{module}.{each.name}" for each in imported), MODULES | FUNCTIONS)
        case ast.Call():
            return danger_of_call(node, names)
        case ast.List(elts=[ast.Constant(value=str(program)), *_]) if program in SHELLS:
            return "shell"
        case ast.Tuple(elts=[ast.Constant(value=str(program)), *_]) if program in SHELLS:
            return "shell"
        case ast.FunctionDef(name=name) | ast.Attribute(attr=name) if name in METHODS:
            return name
        case ast.Attribute():
            return is_in(dotted(node, names), MODULES | FUNCTIONS)
    return ""


def dangers(tree: ast.Module) -> Iterator[tuple[ast.AST, str]]:
    """Yield each construct that could run what comes from outside, and its name."""
    names = names_in(tree)
    for node in ast.walk(tree):
        if found := danger_of(node, names):
            yield node, found


def test_nothing_from_outside_can_run_code() -> None:
    found = [
        f"{where(path, node)} {what}"
        for path in python_files("decod", "scripts")
        for node, what in dangers(parse(path))
        if (str(path.relative_to(ROOT)), what) not in ALLOWED
    ]
    assert not found


def test_every_exception_is_still_needed() -> None:
    used = {
        (str(path.relative_to(ROOT)), what)
        for path in python_files("decod", "scripts")
        for _, what in dangers(parse(path))
    }
    assert set(ALLOWED) - used == set()


CAUGHT = """
from jinja2 import Environment
import pickle
import cPickle as fast
from pickle import loads
import dill, os
import cloudpickle
import joblib
import marshal
import shelve
import yaml
from yaml import safe_load
import multiprocessing.connection
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import Queue
import torch; torch.load(path)
import torch; torch.load(path, weights_only=True)
import torch as t; t.load(path)
from torch import load
from torch import load as get
import torch; getattr(torch, "load")(path)
import torch; reader = torch.load
import torch; torch.save(model, path)
import torch; torch.jit.load(path)
import torch.jit
from torch import jit
from torch.jit import script
import torch; torch.hub.load("owner/model", "model")
import torch; torch.package.PackageImporter(path)
import torch; torch.ops.load_library(path)
import torch.distributed as dist
import numpy; numpy.load(path)
import numpy as np; np.load(path, allow_pickle=True)
import numpy as np; np.load(path)
read(path, allow_pickle=True)
read(path, allow_pickle=flag)
frame.read_pickle(path)
eval(text)
exec(text)
compile(text, "x", "exec")
__import__(name)
import builtins; builtins.eval(text)
import importlib; importlib.import_module(name)
from importlib import import_module; import_module(name)
import importlib; importlib.import_module(f"{name}.plugin")
import importlib; importlib.import_module("pickle")
import importlib.util; importlib.util.spec_from_file_location("x", path)
import runpy
import ctypes
import types; types.CodeType(*parts)
import transformers
from transformers import AutoModelForCausalLM
import datasets
from huggingface_hub import snapshot_download
AutoModel.from_pretrained(name, trust_remote_code=True)
Tokenizer.from_pretrained(name)
load(name, trust_remote_code=True)
import subprocess; subprocess.run(text, shell=True)
import subprocess; subprocess.Popen(text, shell=flag)
import subprocess; subprocess.run(["sh", "-c", text])
import subprocess; subprocess.run(("/bin/bash", "-c", text))
import subprocess; subprocess.getoutput(text)
import asyncio; asyncio.create_subprocess_shell(text)
import os; os.system(text)
import os; os.popen(text)
from os import system
import tarfile
import zipfile
from zipfile import ZipFile
archive.extractall(folder)
import shutil; shutil.unpack_archive(path)
import xml.etree.ElementTree
from xml.sax import parse
from lxml import etree
server.load_state(path)
Server.save_state(path)
socket.recv_pyobj()
class Sneaky: __reduce__ = 1; x = self.__reduce__
class Sneaky:\n    def __reduce__(self): pass
"""

HARMLESS = """
import re; re.compile(r"x")
from re import compile; compile(r"x")
self.load(path)
states.load(path)
json.load(file)
import torch; torch.tensor([1])
import torch; torch.distributions
import tokenizers; tokenizers.Tokenizer.from_buffer(content)
import importlib; importlib.import_module("matplotlib.figure")
import importlib; importlib.import_module(f"decod.cli.{name}_command")
import subprocess; subprocess.run([program, "--version"], shell=False)
import numpy; numpy.frombuffer(data)
import ast; ast.literal_eval(text)
model.eval()
text = "pickle.loads(eval(x))"
"""


def _each(snippets: str) -> list[str]:
    return [line.replace("\\n", "\n") for line in snippets.strip().splitlines()]


@pytest.mark.parametrize("snippet", _each(CAUGHT.replace("\n    def", "\\n    def")))
def test_each_way_to_run_foreign_code_is_caught(snippet: str) -> None:
    assert list(dangers(ast.parse(snippet)))


@pytest.mark.parametrize("snippet", _each(HARMLESS))
def test_what_only_looks_like_it_is_not(snippet: str) -> None:
    assert not list(dangers(ast.parse(snippet)))
