# SPDX-License-Identifier: Apache-2.0
"""vLLM: the tiering offload manager with its file tier, and the disk backend of SimpleCPUOffload."""
import contextlib
import dataclasses
import hashlib
import logging
import os
import sys
import time
import types

import safetensors.torch  # noqa: F401 - the example connector names it without importing it
import stubs
import torch
from blocks import check
from data import blob

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
stubs.packages("vllm", "vllm.utils", "vllm.v1", "vllm.distributed", "vllm.distributed.kv_transfer",
               "vllm.distributed.kv_transfer.kv_connector", _CONNECTOR, f"{_CONNECTOR}.offloading")
stubs.logger_module("vllm.logger")
# Metrics, the GPU's side, and the configuration of the whole engine.
stubs.stub("vllm.config", "vllm.platforms", f"{_CONNECTOR}.base",
           "vllm.v1.kv_offload.cpu.gpu_worker", "vllm.v1.kv_offload.cpu.host_register",
           "vllm.model_executor.layers.attention.mla_attention", "vllm.v1.attention.backend",
           "vllm.v1.core.sched.output", "vllm.v1.kv_cache_interface")
stubs.stub(f"{_CONNECTOR}.metrics").KVConnectorStats = dataclasses.make_dataclass(
    "KVConnectorStats", [("data", dict, dataclasses.field(default_factory=dict))])
stubs.provide("vllm.utils.gpu_sync_debug", gpu_sync_allowed=contextlib.nullcontext)
stubs.provide("vllm.utils.hashing", safe_hash=hashlib.md5)
stubs.stub("vllm.v1.simple_kv_offload.cuda_mem_ops")
vars(sys.modules["vllm.v1.simple_kv_offload.cuda_mem_ops"]).update(
    CU_MEMCPY_SRC_ACCESS_ORDER_ANY=0, CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1,
    build_params=lambda a, b, *args, **kwargs: (list(a.values()), list(b.values())),
    copy_blocks=lambda *args: _copy_blocks(*args), pin_tensor=lambda tensor: None)
sys.modules["vllm.platforms"].current_platform = types.SimpleNamespace(
    set_device=lambda device: None)
torch.Event = lambda: _NoGpu()  # of a newer PyTorch
stubs.provide("vllm.distributed.device_communicators.shm_broadcast",
              check_shm_free_space=lambda *a, **k: None)
# The offload worker's C code for batches of files: part of the package, linked against PyTorch.
stubs.torch_libraries()

from vllm.v1.kv_offload import base, config  # noqa: E402
from vllm.v1.kv_offload.tiering.fs import io as fs_io  # noqa: E402
from vllm.v1.kv_offload.tiering.fs import manager as fs_manager  # noqa: E402
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec  # noqa: E402

logging.getLogger("vllm").setLevel(logging.ERROR)



class Tiering:
    """TieringOffloadingSpec's manager: a CPU tier of CPU_BLOCKS blocks over the tier of type fs."""

    def __init__(self, folder, size, cpu_blocks=8, in_c=True):
        assert fs_io._HAS_FSIO_C and fs_manager._HAS_BATCH_LOOKUP_C
        fs_io._HAS_FSIO_C = fs_manager._HAS_BATCH_LOOKUP_C = in_c
        self.size = size
        self.stride = -(-size // 4096) * 4096
        self.requests = 0
        group = config.OffloadingGroupConfig(16, ("model.layers.0.self_attn.attn",), 0)
        spec = TieringOffloadingSpec(config.OffloadingConfig(
            groups=(group,), worker_kv_bytes_per_block=size, enable_kv_cache_events=False,
            extra_config={"cpu_bytes_to_use": self.stride * cpu_blocks,
                          "secondary_tiers": [{"type": "fs", "root_dir": folder}]},
            engine_id=f"kvfs-test-{os.getpid()}",
            model=config.OffloadingModelConfig("meta-llama/Llama-3.1-8B", "bfloat16"),
            cache=config.OffloadingCacheConfig(16, 1),
            parallel=config.OffloadingParallelConfig(0, 1, 1, 1, 1, 1, 0, 1, None, True)))
        self.manager = spec.get_manager()
        # An engine that is killed must not leave its CPU tier in memory.
        os.unlink(spec._scheduler_mmap.mmap_path)
        self.memory = self.manager.primary_tier.get_kv_memoryview().cast("B")
        (self.tier,) = self.manager.secondary_tiers
        self.batch = cpu_blocks

    def uses_o_direct(self):
        return self.tier._use_o_direct

    def _request(self):
        self.requests += 1
        context = base.ReqContext(f"request-{self.requests}")
        self.manager.on_new_request(context)
        return context

    def _step(self):
        self.manager.on_schedule_end(base.ScheduleEndContext((), ()))
        time.sleep(0.001)

    def _block(self, chunk):
        return self.memory[int(chunk) * self.stride:][:self.size]

    @staticmethod
    def _key(number):
        return base.make_offload_key(hashlib.sha256(str(number).encode()).digest(), 0)

    def _batches(self, numbers):
        for start in range(0, len(numbers), self.batch):
            yield numbers[start:start + self.batch]

    def store(self, numbers):
        for batch in self._batches(numbers):
            context = self._request()
            keys = {self._key(n): n for n in batch}
            # None: what the CPU tier holds is still on its way to or from files.
            while (prepared := self.manager.prepare_store(list(keys), context)) is None:
                self._step()
            for key, chunk in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids):
                self._block(chunk)[:] = blob(keys[key], self.size)
            if prepared.keys_to_store:
                self.manager.complete_store(prepared.keys_to_store, context)
            self.tier.drain_jobs()
            self._step()
            self.manager.on_request_finished(context)

    def present(self, numbers):
        context = self._request()
        found = {}
        while len(found) < len(numbers):
            for n in numbers:
                result = self.tier.lookup(self._key(n), context)
                if result is not base.LookupResult.RETRY:
                    found[n] = result is base.LookupResult.HIT
            self._step()
        self.manager.on_request_finished(context)
        return [found[n] for n in numbers]

    def load(self, numbers):
        return [hit for batch in self._batches(numbers) for hit in self._load(batch)]

    def _load(self, numbers):
        context = self._request()
        found = {}
        while len(found) < len(numbers):
            for n in (n for n in numbers if n not in found):
                result = self.manager.lookup(self._key(n), context)
                if result in (base.LookupResult.HIT, base.LookupResult.MISS):
                    found[n] = result is base.LookupResult.HIT and self._read(n, context)
            self._step()
        # Until here what was found was pinned, as it is until the GPU has it.
        self.manager.complete_load([self._key(n) for n in numbers if found[n]], context)
        self.manager.on_request_finished(context)
        return [found[n] for n in numbers]

    def _read(self, number, context):
        (chunk,) = self.manager.prepare_load([self._key(number)], context).chunk_ids
        return check(number, self.size, self._block(chunk))

    def close(self):
        self.manager.shutdown()


class _NoGpu:
    """Streams and events of a device that is always done."""

    def __getattr__(self, name):
        return lambda *args, **kwargs: None


def _copy_blocks(sources, targets, params):
    """What the GPU's copy engine does: the same block of every layer."""
    for source, target in zip(*params):
        for a, b in zip(sources, targets):
            target[b] = source[a]


class Disk:
    """SimpleCPUOffload's disk backend: slots of one file; a list of layers stands for the GPU."""

    LAYERS = 4

    def __init__(self, folder, size, slots, page_cache=False):
        from vllm.v1.simple_kv_offload import disk_backend

        self.size = size
        self.path = f"{folder}/disk-cache"
        self.done = []
        self.gpu = {f"layer{i}": torch.zeros((16, size // self.LAYERS), dtype=torch.int8)
                    for i in range(self.LAYERS)}
        self.backend = disk_backend.DiskBackend()
        self.backend.init(self.gpu, "cpu", _NoGpu(), _NoGpu(), self.path, slots, size,
                          use_page_cache=page_cache)

    def _copy(self, sources, targets, is_store):
        before = len(self.done)
        self.backend.launch_copy(sources, targets, is_store, 0, self.done)
        end = time.monotonic() + 180
        while len(self.done) == before:
            threads = (self.backend._store_thread, self.backend._load_thread)
            assert all(t.is_alive() for t in threads), "the backend's thread has failed"
            assert time.monotonic() < end, "a copy was not completed"
            time.sleep(0.001)

    def store(self, numbers):
        """Block N to slot N."""
        for start in range(0, len(numbers), 16):
            batch = numbers[start:start + 16]
            for at, n in enumerate(batch):
                layers = torch.frombuffer(bytearray(blob(n, self.size)), dtype=torch.int8)
                for layer, part in zip(self.gpu.values(), layers.view(self.LAYERS, -1)):
                    layer[at] = part
            self._copy(list(range(len(batch))), batch, True)

    def load(self, numbers):
        for start in range(0, len(numbers), 16):
            batch = numbers[start:start + 16]
            self._copy(batch, list(range(len(batch))), False)
            for at, n in enumerate(batch):
                check(n, self.size, torch.cat([t[at] for t in self.gpu.values()]).numpy().data)
        return [True] * len(numbers)

    def unlink(self):
        os.unlink(self.path)

    def close(self):
        self.backend.shutdown()


class Example:
    """ExampleConnector (once SharedStorageConnector): a folder for a prompt, a file for a layer."""

    BLOCK = 16

    def __init__(self, folder, size):
        from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector as module

        self.module = module
        self.layers = [f"model.layers.{i}.self_attn.attn" for i in range(4)]
        # A prompt of two blocks of tokens (the last token is not stored) has 32 tokens' KV.
        self.shape = (4, 2, self.BLOCK, size // (2 * self.BLOCK * 2 * 4 * 2))
        extra = types.SimpleNamespace(get_from_extra_config=lambda key, default: folder)
        base_class = module.KVConnectorBase_V1
        base_class.__init__ = lambda connector, **kwargs: setattr(
            connector, "_kv_transfer_config", extra)
        base_class._get_connector_metadata = lambda connector: self.metadata
        self.connector = module.ExampleConnector(
            types.SimpleNamespace(cache_config=types.SimpleNamespace(block_size=self.BLOCK)),
            None, None)

    def _prompt(self, number):
        return [number * 1000 + i for i in range(2 * self.BLOCK + 2)]

    def _request(self, number, is_store):
        self.metadata = self.module.ExampleConnectorMetadata()
        self.metadata.add_request(self._prompt(number)[:-1], [1, 3, 0], self.BLOCK, is_store, [])

    def _kv(self, number, layer):
        count = torch.Size(self.shape).numel()
        content = bytearray(blob(number * 10 + layer, count * 2))
        return torch.frombuffer(content, dtype=torch.int16).view(torch.float16).view(self.shape)

    def store(self, numbers):
        for n in numbers:
            self._request(n, True)
            for i, name in enumerate(self.layers):
                self.connector.save_kv_layer(name, self._kv(n, i), {})
            self.connector.wait_for_save()

    def present(self, numbers):
        found = []
        for n in numbers:
            request = types.SimpleNamespace(prompt_token_ids=self._prompt(n), mm_features=[])
            tokens, _ = self.connector.get_num_new_matched_tokens(request, 0)
            assert tokens in (0, 2 * self.BLOCK), tokens
            found.append(tokens > 0)
        return found

    def load(self, numbers):
        """Unlike the connector, which raises on a missing layer, asks first."""
        found = self.present(numbers)
        for n in (n for n, hit in zip(numbers, found) if hit):
            self._request(n, False)
            layers = {name: types.SimpleNamespace(kv_cache=torch.zeros(self.shape).half())
                      for name in self.layers}
            context = types.SimpleNamespace(attn_metadata=dict.fromkeys(self.layers),
                                            no_compile_layers=layers)
            self.connector.start_load_kv(context)
            for i, layer in enumerate(layers.values()):
                for block in (1, 3):
                    check_equal(layer.kv_cache[block], self._kv(n, i)[block], n)
        return found

    def close(self):
        pass


def check_equal(one, other, number):
    same = one.contiguous().view(torch.int16).equal(other.contiguous().view(torch.int16))
    assert same, f"prompt {number} is wrong"


class Hf3fs:
    """The hf3fs connector's client for files (hf3fs_mock_client)."""

    def __init__(self, folder, size, pages):
        from vllm.distributed.kv_transfer.kv_connector.v1.hf3fs.utils import hf3fs_mock_client

        self.size = size
        torch.cuda.current_stream = _NoGpu
        self.client = hf3fs_mock_client.Hf3fsClient(f"{folder}/hf3fs", pages * size, size, 8)

    def store(self, numbers):
        pages = [torch.frombuffer(bytearray(blob(n, self.size)), dtype=torch.uint8)
                 for n in numbers]
        done = self.client.batch_write([n * self.size for n in numbers], pages, None)
        assert done == [self.size] * len(numbers), done

    def load(self, numbers):
        pages = [torch.zeros(self.size, dtype=torch.uint8) for _ in numbers]
        done = self.client.batch_read([n * self.size for n in numbers], pages)
        assert done == [self.size] * len(numbers), done
        return [check(n, self.size, page.numpy()) for n, page in zip(numbers, pages)]

    def close(self):
        self.client.close()
