# SPDX-License-Identifier: Apache-2.0
"""Files of a kvfs mount in device memory: libkvg (kvg.h) for Python.

    with kvg.Context() as gpu, open("/kv/model/prefix", "rb") as f:
        with gpu.map(f) as buffer:
            kv = torch.from_dlpack(buffer.tensor(shape, "float16"))
            ...
            del kv

A buffer is memory that other processes read too: do not write to it. It lives until it is closed and
nothing made from it (from_dlpack) is left. Errors are OSErrors, as kvg.h lists them.
"""
import collections
import contextlib
import ctypes
import errno
import itertools
import os
import threading

MAP_EARLY, MAP_NOSTAGE, MAP_REVOCABLE = 1, 2, 4
REVOKE, INVALID = 1, 2
_CONTROL, _NO_HELPER, _LATENCY, _NO_KERNELS = 1, 2, 4, 8

_EVENT = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint)


class _Opts(ctypes.Structure):
    _fields_ = [("size", ctypes.c_uint32), ("flags", ctypes.c_uint32), ("device", ctypes.c_char_p),
                ("backend", ctypes.c_char_p), ("event", _EVENT), ("arg", ctypes.c_void_p)]


class _Info(ctypes.Structure):
    _fields_ = [("ptr", ctypes.c_uint64), ("off", ctypes.c_uint64), ("len", ctypes.c_uint64),
                ("version", ctypes.c_uint64), ("ino", ctypes.c_uint64),
                ("uuid", ctypes.c_uint8 * 16), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32)]


class _Seg(ctypes.Structure):
    _fields_ = [("file_off", ctypes.c_uint64), ("len", ctypes.c_uint64), ("dst", ctypes.c_uint64)]


class _Stat(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("help", ctypes.c_char_p), ("value", ctypes.c_uint64)]


class _Helper(ctypes.Structure):
    _fields_ = [("uuid", ctypes.c_uint8 * 16), ("granularity", ctypes.c_uint64),
                ("segment", ctypes.c_uint64), ("budget", ctypes.c_uint64),
                ("name", ctypes.c_char * 64), ("mode", ctypes.c_char * 96),
                ("reasons", ctypes.c_char * 512)]


def _load():
    lib = ctypes.CDLL(os.environ.get("KVG_LIBRARY", "libkvg.so.0"), use_errno=True)
    pointer, number = ctypes.c_void_p, ctypes.c_uint64
    for name, *types in (
            ("open", pointer, ctypes.c_char_p, pointer), ("dispatch", pointer), ("fd", pointer),
            ("map", pointer, ctypes.c_int, number, number, ctypes.c_uint, pointer),
            ("wait", pointer, number, ctypes.c_int), ("unmap", pointer, pointer),
            ("info", pointer, pointer), ("scatter", pointer, pointer, ctypes.c_size_t, pointer),
            ("pull", pointer, ctypes.c_int, pointer, ctypes.c_size_t, pointer, pointer),
            ("push", pointer, ctypes.c_int, pointer, ctypes.c_size_t, pointer, pointer),
            ("op_poll", pointer, ctypes.c_int), ("op_free", pointer), ("close", pointer),
            ("prefetch", pointer, ctypes.c_int, number, number, ctypes.c_int, ctypes.c_uint),
            ("evict", pointer, ctypes.c_int, pointer), ("helper", pointer, pointer),
            ("stats", pointer, ctypes.c_int, pointer, ctypes.c_size_t, pointer),
            ("error", pointer), ("last_cuda", pointer)):
        function = getattr(lib, "kvg_" + name)
        function.argtypes = types
        function.restype = ctypes.c_char_p if name == "error" else ctypes.c_int
    lib.kvg_close.restype = lib.kvg_op_free.restype = None
    return lib


_lib = _load()


def _descriptor(file):
    return file if isinstance(file, int) else file.fileno()


def _segments(segments):
    """(file offset, bytes, device address) each."""
    segments = list(segments)
    return (_Seg * len(segments))(*(_Seg(*s) for s in segments)), len(segments)


class Context:
    """One engine's connection to the helper of one device. Calls of several threads take turns.

    ON_EVENT(buffer, event, ms) is called by dispatch() and other calls that wait; of this context it
    may only close buffers.
    """

    def __init__(self, socket=None, device=None, backend=None, control=False, helper=True,
                 on_event=None, latency=False, kernels=True):
        self._handle = ctypes.c_void_p()
        self._buffers = {}
        # libkvg takes one call at a time. Tensors end in any thread, and amid a call of their own
        # one: their buffers are queued, and unmapped when nobody is inside.
        self._lock, self._caller = threading.Lock(), None
        self._dead = collections.deque()
        self._on_event = on_event
        self._hook = _EVENT(self._event)
        flags = (_CONTROL if control else 0) | (0 if helper else _NO_HELPER)
        flags |= (_LATENCY if latency else 0) | (0 if kernels else _NO_KERNELS)
        opts = _Opts(ctypes.sizeof(_Opts), flags, device and os.fsencode(str(device)),
                     backend and backend.encode(), self._hook, None)
        self._check(_lib.kvg_open(ctypes.byref(self._handle), socket and os.fsencode(socket),
                                  ctypes.byref(opts)))

    def _check(self, result):
        if result < 0:
            words = _lib.kvg_error(self._handle) or b""
            raise OSError(-result, words.decode(errors="replace") or os.strerror(-result))
        return result

    def _event(self, _arg, buffer, event, ms):
        if self._on_event:
            self._on_event(self._buffers.get(buffer), event, ms)

    @contextlib.contextmanager
    def _inside(self):
        """One call of libkvg."""
        if self._caller == threading.get_ident():
            raise RuntimeError("on_event may only close buffers: call this after dispatch()")
        with self._lock:
            self._caller = threading.get_ident()
            try:
                self._unmap_dead()
                yield
            finally:
                self._caller = None
        self._bury()

    def _call(self, function, *args):
        with self._inside():
            return self._check(function(*args))

    def _unmap_dead(self):
        while self._dead:
            handle, stream = self._dead.popleft()
            self._buffers.pop(handle.value, None)
            _lib.kvg_unmap(handle, stream)

    def _bury(self):
        """Unmaps what is queued, unless somebody is inside, who does it then."""
        while self._dead and self._lock.acquire(blocking=False):
            try:
                self._unmap_dead()
            finally:
                self._lock.release()

    def fileno(self):
        """For select and poll; then dispatch()."""
        return _lib.kvg_fd(self._handle)

    def dispatch(self):
        self._call(_lib.kvg_dispatch, self._handle)

    def map(self, file, off=0, length=0, flags=0):
        """The file, or a range of it, in device memory."""
        handle = ctypes.c_void_p()
        with self._inside():
            self._check(_lib.kvg_map(self._handle, _descriptor(file), off, length, flags,
                                     ctypes.byref(handle)))
            return Buffer(self, handle)

    def pull(self, file, segments, stream=None, wait=True):
        """Copies (file offset, bytes, device address) segments out of a file."""
        return self._transfer(_lib.kvg_pull, file, segments, stream, wait)

    def push(self, file, segments, stream=None, wait=True):
        """Writes segments of device memory into a file that is open for writing."""
        return self._transfer(_lib.kvg_push, file, segments, stream, wait)

    def _transfer(self, function, file, segments, stream, wait):
        handle = ctypes.c_void_p()
        array, count = _segments(segments)
        self._call(function, self._handle, _descriptor(file), array, count, stream,
                   ctypes.byref(handle))
        op = Op(self, handle)
        if wait:
            with op:
                op.wait()
            return None
        return op

    def prefetch(self, file, off=0, length=0, prio=0, ttl=0):
        """Asks for it to be brought in. PRIO < 0: when there is nothing else to do; > 0: at once.

        What nobody has mapped within TTL seconds is given up; 0: it stays until room is short.
        """
        self._call(_lib.kvg_prefetch, self._handle, _descriptor(file), off, length, prio,
                   round(ttl * 1000))

    def evict(self, file):
        """Bytes that were freed."""
        freed = ctypes.c_uint64()
        self._call(_lib.kvg_evict, self._handle, _descriptor(file), ctypes.byref(freed))
        return freed.value

    def stats(self, file=None):
        array, count = (_Stat * 64)(), ctypes.c_size_t()
        self._call(_lib.kvg_stats, self._handle, -1 if file is None else _descriptor(file), array,
                   len(array), ctypes.byref(count))
        return {s.name.decode(): s.value for s in array[:count.value]}

    def helper(self):
        """What the helper has said of itself."""
        found = _Helper()
        self._call(_lib.kvg_helper, self._handle, ctypes.byref(found))
        return {"uuid": bytes(found.uuid).hex(), "granularity": found.granularity,
                "segment": found.segment, "budget": found.budget, "name": found.name.decode(),
                "mode": found.mode.decode(), "reasons": found.reasons.decode()}

    def close(self):
        """All buffers and ops must be closed, and what was made from them gone."""
        with self._inside():
            if self._buffers:
                raise RuntimeError("buffers of this context are still in use")
            handle, self._handle = self._handle, ctypes.c_void_p()
            _lib.kvg_close(handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Op:
    """A pull or push under way."""

    def __init__(self, context, handle):
        self._context, self._handle = context, handle

    def done(self):
        """Whether it has ended well; raises what it failed with."""
        with self._context._inside():
            result = _lib.kvg_op_poll(self._handle, 0)
            return result != -errno.EAGAIN and self._context._check(result) == 0

    def wait(self, timeout=None):
        self._context._call(_lib.kvg_op_poll, self._handle,
                            -1 if timeout is None else round(timeout * 1000))

    def close(self):
        with self._context._inside():
            handle, self._handle = self._handle, ctypes.c_void_p()
            _lib.kvg_op_free(handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


class Buffer:
    """Mapped device memory. `ptr` and `length`: where and how much; also `version`, `ino`."""

    def __init__(self, context, handle):
        self._context, self._handle = context, handle
        # One item each for this object and for every tensor: a list, for its steps are whole ones.
        self._users, self._last = [None], [handle]
        self._closed, self._stream = False, None
        context._buffers[handle.value] = self
        info = _Info()
        _lib.kvg_info(handle, ctypes.byref(info))
        self.ptr, self.off, self.length = info.ptr, info.off, info.len
        self.version, self.ino = info.version, info.ino
        self.device = (info.device_type, info.device_id)

    def wait(self, upto=None, timeout=None):
        """Until the first UPTO bytes are there: for buffers that were mapped early."""
        self._context._call(_lib.kvg_wait, self._open(), self.length if upto is None else upto,
                            -1 if timeout is None else round(timeout * 1000))

    def scatter(self, segments, stream=None):
        array, count = _segments(segments)
        self._context._call(_lib.kvg_scatter, self._open(), array, count, stream)

    def _open(self):
        if self._closed:
            raise ValueError("the buffer is closed")
        return self._handle

    def tensor(self, shape, dtype, offset=0):
        """What from_dlpack of any library takes: SHAPE elements of DTYPE ("float16") at OFFSET."""
        return Tensor(self, shape, dtype, offset)

    def __dlpack__(self, **kwargs):
        return self.tensor([self.length], "uint8").__dlpack__(**kwargs)

    def __dlpack_device__(self):
        return self.device

    def close(self, stream=None):
        """STREAM: the last one that uses it, which is waited for. A second time does nothing."""
        if self._closed:
            return
        self._closed, self._stream = True, stream
        handle = self._leave()
        if handle and self._context._caller == threading.get_ident():
            self._context._dead.append((handle, stream))
        elif handle:
            with self._context._inside():
                self._context._buffers.pop(handle.value, None)
                self._context._check(_lib.kvg_unmap(handle, stream))

    def _leave(self):
        """One user less. The last one gets the handle, to unmap it."""
        self._users.pop()
        if self._users:
            return None
        try:
            return self._last.pop()
        except IndexError:
            return None

    def _release(self):
        """A tensor of it has ended: in whatever thread, which may be inside a call."""
        handle = self._leave()
        if handle:
            self._context._dead.append((handle, self._stream))
            self._context._bury()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


# ---- DLPack ----

_DTYPES = {"int": 0, "uint": 1, "float": 2, "bfloat": 4, "complex": 5}


class _DLTensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32),
                ("device_id", ctypes.c_int32), ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8),
                ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)),
                ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


class _DLManagedTensor(ctypes.Structure):
    _fields_ = [("dl_tensor", _DLTensor), ("manager_ctx", ctypes.c_void_p),
                ("deleter", ctypes.c_void_p)]


_exports = {}
_keys = itertools.count(1)


def _delete(address):
    managed = _DLManagedTensor.from_address(address)
    buffer, _keep = _exports.pop(managed.manager_ctx)
    buffer._release()


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_capsule_new = ctypes.pythonapi.PyCapsule_New
_capsule_new.restype, _capsule_new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p,
                                                                 ctypes.c_void_p]
_capsule_valid = ctypes.pythonapi.PyCapsule_IsValid
_capsule_valid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_capsule_pointer.restype, _capsule_pointer.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_char_p]


def _unused(capsule):
    """A capsule ends; who has taken the tensor has renamed it."""
    if _capsule_valid(capsule, b"dltensor"):
        _delete(_capsule_pointer(capsule, b"dltensor"))


_destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)(_unused)


class Tensor:
    """A view of a buffer, for from_dlpack."""

    def __init__(self, buffer, shape, dtype, offset=0):
        kind = dtype.rstrip("0123456789")
        bits = int(dtype[len(kind):] or 0)
        if kind not in _DTYPES or bits not in (8, 16, 32, 64, 128):
            raise ValueError(f"no such type: {dtype}")
        self.buffer, self.shape, self.offset = buffer, tuple(shape), offset
        self.code, self.bits = _DTYPES[kind], bits
        size = bits // 8
        for n in self.shape:
            size *= n
        if offset < 0 or min(self.shape, default=0) < 0 or offset + size > buffer.length:
            raise ValueError(f"{offset} + {size} bytes are more than the buffer's {buffer.length}")

    def __dlpack_device__(self):
        return self.buffer.device

    def __dlpack__(self, stream=None, **_):
        # What is mapped is there already, for every stream.
        shape = (ctypes.c_int64 * len(self.shape))(*self.shape)
        managed, key = _DLManagedTensor(), next(_keys)
        managed.dl_tensor = _DLTensor(self.buffer.ptr + self.offset, *self.buffer.device,
                                      len(self.shape), self.code, self.bits, 1,
                                      ctypes.cast(shape, ctypes.POINTER(ctypes.c_int64)), None, 0)
        managed.manager_ctx = key
        managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p)
        self.buffer._open()
        self.buffer._users.append(None)
        _exports[key] = (self.buffer, (managed, shape))
        try:
            return _capsule_new(ctypes.addressof(managed), b"dltensor",
                                ctypes.cast(_destructor, ctypes.c_void_p))
        except BaseException:
            with contextlib.suppress(KeyError):
                del _exports[key]
            self.buffer._release()
            raise
