# SPDX-License-Identifier: Apache-2.0
"""llama.cpp's server with --slot-save-path: sequence state, saved and restored through stdio.

The server is the one in the xllamacpp wheel: llama.cpp of the version it names, built for the CPU, with
the HTTP interface of llama-server. (llama-cpp-python, which the same C++ code is usually had by, is only
published as source, and takes some ten minutes to build on two cores.) The model is made here with the
gguf package: Llama's architecture, random weights. Files are opened with "wb" and "rb", written in small
pieces to a length that is not known at the start, with no temporary name; a restored sequence must give
the very same probabilities for the next tokens.
"""
import contextlib
import http.client
import json
import os
import sys

import numpy as np
import pytest
from data import blob, get, put
from packages import install
from procs import Child, in_child

PACKAGES = ("xllamacpp==2026.10.11549", "gguf==0.19.0", "pyyaml==6.0.2")
VOCABULARY, LAYERS, WIDTH, HEADS, INNER = 512, 4, 256, 8, 512
PROMPT = [259 + (i * 7 + 3) % 200 for i in range(1000)]
NEXT = [300, 301, 302]

pytestmark = pytest.mark.timeout(600)  # the first test also downloads


def write_model(path):
    import gguf
    made = gguf.GGUFWriter(path, "llama")
    made.add_context_length(4096)
    made.add_embedding_length(WIDTH)
    made.add_block_count(LAYERS)
    made.add_feed_forward_length(INNER)
    made.add_head_count(HEADS)
    made.add_head_count_kv(HEADS)
    made.add_layer_norm_rms_eps(1e-5)
    made.add_vocab_size(VOCABULARY)
    made.add_rope_dimension_count(WIDTH // HEADS)
    kind = gguf.TokenType
    made.add_tokenizer_model("llama")
    made.add_token_list([b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256)),
                         *(b"w%d" % i for i in range(VOCABULARY - 259))])
    made.add_token_scores([0.0] * VOCABULARY)
    made.add_token_types([kind.UNKNOWN, kind.CONTROL, kind.CONTROL, *[kind.BYTE] * 256,
                          *[kind.NORMAL] * (VOCABULARY - 259)])
    made.add_bos_token_id(1)
    made.add_eos_token_id(2)
    made.add_unk_token_id(0)
    random = np.random.default_rng(1)

    def tensor(name, *shape):
        values = random.standard_normal(shape, dtype=np.float32)
        made.add_tensor(f"{name}.weight", values / np.float32(np.sqrt(shape[-1])))

    tensor("token_embd", VOCABULARY, WIDTH)
    tensor("output", VOCABULARY, WIDTH)
    made.add_tensor("output_norm.weight", np.ones(WIDTH, np.float32))
    for i in range(LAYERS):
        for norm in ("attn_norm", "ffn_norm"):
            made.add_tensor(f"blk.{i}.{norm}.weight", np.ones(WIDTH, np.float32))
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            tensor(f"blk.{i}.{name}", WIDTH, WIDTH)
        tensor(f"blk.{i}.ffn_gate", INNER, WIDTH)
        tensor(f"blk.{i}.ffn_up", INNER, WIDTH)
        tensor(f"blk.{i}.ffn_down", WIDTH, INNER)
    made.write_header_to_file()
    made.write_kv_data_to_file()
    made.write_tensors_to_file()
    made.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The model's file. The libraries are only loaded in processes that end with their test."""
    folder = os.fspath(install(*PACKAGES))
    path = tmp_path_factory.mktemp("model") / "random.gguf"

    def make():
        sys.path.insert(0, folder)
        write_model(path)

    in_child(make)
    yield path
    path.unlink()


class Server:
    """A llama-server with one slot, in this process; its files go to FOLDER."""

    def __init__(self, model, folder):
        sys.path.insert(0, os.fspath(install(*PACKAGES)))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # it tells every step
        import xllamacpp
        settings = xllamacpp.CommonParams()
        settings.model.path = os.fspath(model)
        settings.slot_save_path = f"{folder}/"
        settings.n_ctx = 4096
        settings.n_parallel = 1
        settings.n_gpu_layers = 0
        settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
        settings.warmup = False
        settings.hostnames = ["127.0.0.1"]
        settings.port = 0
        self.server = xllamacpp.Server(settings)
        self.address = self.server.listening_address.removeprefix("http://")

    def post(self, path, body):
        with contextlib.closing(http.client.HTTPConnection(self.address, timeout=300)) as connection:
            connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def complete(self, tokens):
        """(what is most likely to follow TOKENS, all probabilities; how many tokens were computed)."""
        status, answer = self.post("/completion", {
            "prompt": tokens, "n_predict": 4, "temperature": 0, "n_probs": VOCABULARY,
            "cache_prompt": True, "id_slot": 0})
        assert status == 200, answer
        return answer["completion_probabilities"], answer["timings"]["prompt_n"]

    def slot(self, action, name):
        """The status and how many tokens were saved or restored."""
        status, answer = self.post(f"/slots/0?action={action}", {"filename": name})
        return status, answer.get("n_saved", answer.get("n_restored", answer.get("error")))

    def save(self, name, tokens=PROMPT):
        self.slot("erase", "")
        self.complete(tokens)
        status, saved = self.slot("save", name)
        assert status == 200 and saved >= len(tokens), saved
        return saved

    def restore(self, name, saved, tokens=PROMPT):
        """Restores, and gives the probabilities after it."""
        self.slot("erase", "")
        assert self.slot("restore", name) == (200, saved)
        probabilities, computed = self.complete([*tokens, *NEXT])
        assert computed == len(NEXT), "the restored tokens were not used"
        return probabilities


def store(model, folder, names):
    """Saves a sequence under each name; what would follow each, computed without the files."""
    server = Server(model, folder)
    saved = [server.save(name, PROMPT[i:]) for i, name in enumerate(names)]
    expected = []
    for i, _ in enumerate(names):
        # Computed like that too, since a prompt in one piece gives other roundings.
        server.slot("erase", "")
        server.complete(PROMPT[i:])
        expected.append(server.complete([*PROMPT[i:], *NEXT])[0])
    return saved, expected


def test_save_and_restore(kv, model, elsewhere):
    """By a process that did not save; and the file is the one that is written elsewhere."""
    def load(saved, expected):
        server = Server(model, kv.dir)
        for i in (1, 0):
            assert server.restore(f"{i}.bin", saved[i], PROMPT[i:]) == expected[i]

    saved, expected = in_child(store, model, kv.dir, ["0.bin", "1.bin"])
    assert expected[0] != expected[1]
    in_child(load, saved, expected)
    assert sorted(os.listdir(kv.dir)) == ["0.bin", "1.bin"]
    in_child(store, model, elsewhere, ["0.bin"])
    assert get(kv.dir / "0.bin") == get(elsewhere / "0.bin")


def test_restore_from_the_drive(fresh, model):
    kv = fresh()
    saved, expected = in_child(store, model, kv.mnt, ["a.bin"])
    kv.remount()
    assert in_child(lambda: Server(model, kv.mnt).restore("a.bin", saved[0])) == expected[0]
    assert kv.counter("open_cold") >= 1


def test_missing_and_damaged_files(kv, model):
    """A missing name, and files that are no state at all, are refused; the slot still works."""
    def work():
        server = Server(model, kv.dir)
        assert server.slot("restore", "missing.bin")[0] == 400
        put(kv.dir / "empty.bin", b"")
        assert server.slot("restore", "empty.bin")[0] == 400
        put(kv.dir / "other.bin", blob(1, 100_000))
        assert server.slot("restore", "other.bin")[0] == 400
        saved = server.save("a.bin")
        server.restore("a.bin", saved)

    in_child(work)


def test_p4_a_save_over_a_file_that_is_being_read(kv, model, agent):
    """Truncated in place elsewhere: here whoever has the old state open keeps it, whole."""
    reader = agent()

    def again():
        server = Server(model, kv.dir)
        saved = server.save("a.bin", PROMPT[::-1])
        return server.restore("a.bin", saved, PROMPT[::-1])

    in_child(store, model, kv.dir, ["a.bin"])
    old = get(kv.dir / "a.bin")
    fd = reader.open(os.fspath(kv.dir / "a.bin"))
    assert reader.read(fd, 1000) == old[:1000]
    in_child(again)
    assert get(kv.dir / "a.bin") != old
    assert reader.pread(fd, len(old), 0) == old


def test_p4_restores_while_another_server_saves(kv, model):
    """Slot files of one name, shared by two servers: every restore gets a whole one."""
    def save():
        server = Server(model, kv.dir)
        saved = server.save("a.bin")
        for _ in range(60):
            assert server.slot("save", "a.bin") == (200, saved)

    def load(saved, expected):
        server = Server(model, kv.dir)
        for _ in range(15):
            assert server.restore("a.bin", saved) == expected

    saved, expected = in_child(store, model, kv.dir, ["a.bin"])
    writer = Child(save)
    in_child(load, saved[0], expected[0])
    writer.result()


def test_k1_three_times_what_the_store_holds(fresh, model):
    """4 MiB a slot into 64 MiB: no save fails, and what is still there restores."""
    kv = fresh(size="64M", dram="32M")
    count = 48

    def work():
        server = Server(model, kv.mnt)
        server.complete(PROMPT)
        for i in range(count):
            status, saved = server.slot("save", f"{i}.bin")
            assert status == 200, f"save {i}: {saved}"
        hits = [i for i in range(count) if server.slot("restore", f"{i}.bin") == (200, saved)]
        for i in hits[-1:]:
            server.restore(f"{i}.bin", saved)
        return hits

    hits = in_child(work)
    assert 4 <= len(hits) <= 16, hits
