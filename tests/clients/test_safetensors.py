# SPDX-License-Identifier: Apache-2.0
"""safetensors: saving (the versions that rename and that truncate), loading by mmap and read.

The layout is that of vLLM's ExampleConnector: a directory for each prefix, a file for each layer.
"""
import os
import subprocess
import sys

import numpy as np
import pytest
from data import blob
from packages import install
from procs import parallel
from safetensors import safe_open
from safetensors.numpy import load, load_file, save, save_file

SHAPE = (2, 4, 16, 8, 128)


def layer(seed, shape=SHAPE):
    count = int(np.prod(shape))
    return np.frombuffer(blob(seed, count * 2), dtype=np.uint16).reshape(shape)


@pytest.fixture
def prefix(kv):
    folder = kv.dir / ("ab" * 32)
    os.makedirs(folder, exist_ok=True)
    return folder


def test_save_and_load_layers(prefix):
    for i in range(16):
        save_file({"kv_cache": layer(i)}, prefix / f"model.layers.{i}.attn.safetensors",
                  metadata={"layer": f"{i}"})
    assert len(os.listdir(prefix)) == 16, "no temporary file is left"
    for i in range(16):
        path = prefix / f"model.layers.{i}.attn.safetensors"
        assert np.array_equal(load_file(path)["kv_cache"], layer(i))
        with safe_open(path, framework="np") as f:
            assert f.metadata() == {"layer": f"{i}"}
            assert np.array_equal(f.get_tensor("kv_cache"), layer(i))
            assert np.array_equal(f.get_slice("kv_cache")[1:2, :, 3:9], layer(i)[1:2, :, 3:9])
        with open(path, "rb") as f:
            assert np.array_equal(load(f.read())["kv_cache"], layer(i))


def test_bytes_are_the_same_elsewhere(prefix, elsewhere):
    tensors = {f"t{i}": layer(i, (i + 1, 1000)) for i in range(20)}
    for folder in (prefix, elsewhere):
        save_file(tensors, folder / "f.safetensors")
    data = (prefix / "f.safetensors").read_bytes()
    assert data == (elsewhere / "f.safetensors").read_bytes() == save(tensors)


def test_cold_load(fresh):
    kv = fresh()
    for i in range(8):
        save_file({"kv_cache": layer(i)}, kv.mnt / f"{i}.safetensors")
    kv.remount()
    for i in range(8):
        assert np.array_equal(load_file(kv.mnt / f"{i}.safetensors")["kv_cache"], layer(i))
    assert kv.counter("open_cold") >= 8


def test_saving_again_leaves_mapped_tensors_alone(prefix):
    path = prefix / "layer.safetensors"
    save_file({"kv_cache": layer(1)}, path)
    with safe_open(path, framework="np") as f:
        save_file({"kv_cache": layer(2)}, path)
        assert np.array_equal(f.get_tensor("kv_cache"), layer(1))
    assert np.array_equal(load_file(path)["kv_cache"], layer(2))


OLD_WRITER = """
import sys
import numpy as np
import safetensors
from safetensors.numpy import save_file
assert safetensors.__version__ == "0.7.0", safetensors.__version__
data = np.frombuffer(open(sys.argv[1], "rb").read(), dtype=np.uint16)
save_file({"kv_cache": data}, sys.argv[2])
"""


def test_p4_the_truncating_version_leaves_mapped_tensors_alone(prefix, elsewhere):
    """0.7 truncates in place, which elsewhere destroys live mappings; here it makes a version."""
    folder = install("safetensors==0.7.0")
    path, source = prefix / "layer.safetensors", elsewhere / "raw"

    def old_save(seed):
        source.write_bytes(layer(seed).tobytes())
        subprocess.run([sys.executable, "-c", OLD_WRITER, source, path], check=True, timeout=200,
                       env={**os.environ, "PYTHONPATH": os.fspath(folder)})

    old_save(1)
    with safe_open(path, framework="np") as f:
        old_save(2)
        assert np.array_equal(f.get_tensor("kv_cache").reshape(SHAPE), layer(1))
    assert np.array_equal(load_file(path)["kv_cache"].reshape(SHAPE), layer(2))


def test_several_processes_save_and_load_one_prefix(prefix):
    def work(number):
        for turn in range(10):
            for i in range(4):
                path = prefix / f"{i}.safetensors"
                if (number + turn) % 2:
                    save_file({"kv_cache": layer(i)}, path)
                elif path.exists():
                    assert np.array_equal(load_file(path)["kv_cache"], layer(i))

    parallel(work, range(4))
    for i in range(4):
        assert np.array_equal(load_file(prefix / f"{i}.safetensors")["kv_cache"], layer(i))
