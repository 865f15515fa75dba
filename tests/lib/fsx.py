# SPDX-License-Identifier: Apache-2.0
"""Random file operations checked against a model in memory, in the manner of fsx."""
import errno
import mmap
import os
import random

from syscalls import FALLOC_KEEP_SIZE, FALLOC_PUNCH_HOLE, FALLOC_ZERO_RANGE, fallocate


class Fsx:
    """One file and its model. A failure of run(COUNT) shows the seed and the last operations."""

    def __init__(self, path, seed, limit=3 << 20):
        self.path = path
        self.seed = seed
        self.limit = limit
        self.random = random.Random(seed)
        self.model = bytearray()
        self.done = []
        self.fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_TRUNC, 0o644)

    # ---- choices ----

    def offset(self, limit):
        value = self.random.randrange(limit + 1)
        return value & ~4095 if self.random.random() < 0.3 else value

    def span(self, end=None):
        """(offset, length) with length > 0 within the limit (or within END bytes)."""
        end = self.limit if end is None else end
        start = min(self.offset(end), end - 1)
        length = self.random.choice((1, 7, 4096, 65536, end))
        return start, self.random.randint(1, max(1, min(length, end - start)))

    def put(self, offset, data):
        if len(self.model) < offset + len(data):
            self.model.extend(bytes(offset + len(data) - len(self.model)))
        self.model[offset:offset + len(data)] = data

    def compare(self, got, offset, length):
        expected = self.model[offset:offset + length]
        assert len(got) == len(expected), f"{len(got)} bytes, not {len(expected)}"
        if got != expected:
            wrong = [i for i in range(len(got)) if got[i] != expected[i]]
            raise AssertionError(f"{len(wrong)} wrong bytes in {offset + wrong[0]}.."
                                 f"{offset + wrong[-1]}, zeros: {not any(got[i] for i in wrong)}")

    # ---- operations: each names itself and its numbers ----

    def op_write(self):
        offset, length = self.span()
        data = self.random.randbytes(length)
        assert os.pwrite(self.fd, data, offset) == length
        self.put(offset, data)
        return offset, length

    def op_append(self):
        length = self.random.randint(1, 70_000)
        if len(self.model) + length > self.limit:
            return ()
        data = self.random.randbytes(length)
        fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        self.close_and_reopen(fd, data)
        return (length,)

    def close_and_reopen(self, fd, data):
        """DATA through FD alone: our own descriptor would be another writer."""
        os.close(self.fd)
        os.write(fd, data)
        os.close(fd)
        self.put(len(self.model), data)
        self.fd = os.open(self.path, os.O_RDWR)

    def op_read(self):
        if not self.model:
            return ()
        offset, length = self.span(len(self.model))
        self.compare(os.pread(self.fd, length, offset), offset, length)
        return offset, length

    def op_truncate(self):
        size = self.offset(self.limit)
        os.ftruncate(self.fd, size)
        self.model.extend(bytes(max(0, size - len(self.model))))
        del self.model[size:]
        return (size,)

    def op_map_read(self):
        if not self.model:
            return ()
        offset, length = self.span(len(self.model))
        flags = self.random.choice((mmap.MAP_SHARED, mmap.MAP_PRIVATE))
        with mmap.mmap(self.fd, len(self.model), flags=flags, prot=mmap.PROT_READ) as m:
            self.compare(m[offset:offset + length], offset, length)
        return offset, length

    def op_map_write(self):
        if not self.model:
            return ()
        offset, length = self.span(len(self.model))
        data = self.random.randbytes(length)
        with mmap.mmap(self.fd, len(self.model), flags=mmap.MAP_SHARED) as m:
            m[offset:offset + length] = data
            if self.random.random() < 0.5:
                m.flush()
        self.model[offset:offset + length] = data
        return offset, length

    def op_punch(self):
        offset, length = self.span()
        fallocate(self.fd, FALLOC_PUNCH_HOLE | FALLOC_KEEP_SIZE, offset, length)
        end = min(offset + length, len(self.model))
        if end > offset:
            self.model[offset:end] = bytes(end - offset)
        return offset, length

    def op_zero(self):
        offset, length = self.span()
        fallocate(self.fd, FALLOC_ZERO_RANGE, offset, length)
        self.put(offset, bytes(length))
        return offset, length

    def op_fallocate(self):
        offset, length = self.span()
        keep = self.random.random() < 0.5
        fallocate(self.fd, FALLOC_KEEP_SIZE if keep else 0, offset, length)
        if not keep:
            self.model.extend(bytes(max(0, offset + length - len(self.model))))
        return offset, length, keep

    def op_seek(self):
        """SEEK_DATA may only skip zeros."""
        if not self.model:
            return ()
        offset = self.random.randrange(len(self.model))
        try:
            data = os.lseek(self.fd, offset, os.SEEK_DATA)
        except OSError as e:
            assert e.errno == errno.ENXIO
            data = len(self.model)
        assert not any(self.model[offset:data]), f"SEEK_DATA skipped data at {offset}"
        hole = os.lseek(self.fd, offset, os.SEEK_HOLE)
        assert offset <= hole <= len(self.model)
        return offset, data, hole

    def op_fsync(self):
        os.fsync(self.fd)
        return ()

    def op_reopen(self):
        os.close(self.fd)
        self.fd = os.open(self.path, os.O_RDWR)
        self.compare(os.pread(self.fd, self.limit + 1, 0), 0, self.limit + 1)
        return ()

    def op_read_published(self):
        """As another reader sees it when no writer has it open."""
        os.close(self.fd)
        self.fd = os.open(self.path, os.O_RDONLY)
        self.compare(os.pread(self.fd, self.limit + 1, 0), 0, self.limit + 1)
        os.close(self.fd)
        self.fd = os.open(self.path, os.O_RDWR)
        return ()

    def op_rename(self):
        new = f"{os.fspath(self.path)[:-2]}.{self.random.randrange(10)}"
        os.rename(self.path, new)
        self.path = new
        return ()

    def op_direct(self):
        """O_DIRECT switched on for a write and a read at any alignment."""
        offset, length = self.span()
        data = self.random.randbytes(length)
        direct = os.open(self.path, os.O_RDWR | os.O_DIRECT)
        os.close(self.fd)
        self.fd = direct
        assert os.pwrite(direct, data, offset) == length
        self.put(offset, data)
        assert os.pread(direct, length, offset) == data
        return offset, length

    WEIGHTS = {"write": 10, "append": 2, "read": 8, "truncate": 4, "map_read": 4, "map_write": 5,
               "punch": 3, "zero": 2, "fallocate": 2, "seek": 3, "fsync": 1, "reopen": 3,
               "read_published": 3, "rename": 1}

    def run(self, count, direct=False):
        weights = {**self.WEIGHTS, **({"direct": 3} if direct else {})}
        names, shares = list(weights), list(weights.values())
        name = None
        try:
            for _ in range(count):
                name = self.random.choices(names, shares)[0]
                self.done.append((name, None))
                self.done[-1] = (name, getattr(self, f"op_{name}")())
                assert os.fstat(self.fd).st_size == len(self.model)
            name = "last look"
            self.op_reopen()
        except Exception as e:
            history = "\n".join(f"  {n} {a}" for n, a in self.done[-25:])
            raise AssertionError(f"seed {self.seed}, operation {len(self.done)} ({name}): {e}\n"
                                 f"the last operations:\n{history}") from e
        finally:
            os.close(self.fd)
