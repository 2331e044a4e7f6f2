"""A device as torch sees it: prepares each case, and times it. CUDA by events and graphs, CPU by the clock.

One CPU thread is timed by the time that it ran: what else the machine does then takes no part of it.

Every weight is a view of one pool of random numbers, larger than the caches; calls rotate through it, so that each
finds its weights in memory. Nothing is trained and nothing is loaded: kernels' time does not depend on the values.
"""

import itertools
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from infersim.models.architecture import Model

from .cases import BLOCK_SIZE, Case
from .torch_model import Decoder, Matrix, activation, attention, norm, sample

INT4_GROUP = 128  # weights that share a scale
CUDA_SAMPLE, CPU_SAMPLE = 3e-3, 5e-3  # seconds that one sample takes at least
MOST_CALLS = 2000  # in a sample
LEAST_CACHE = 32 * 2**20  # bytes, where the system does not tell
TINY = 2048  # elements of a kernel that does nothing but be launched
POWER_SECONDS = 1.5


class Unsupported(Exception):
    """This device or this torch cannot run the case; says why."""


class TorchDevice:
    """`name` is torch's: cpu, cuda or cuda:1. The model's weights are the pool's first views."""

    def __init__(self, name: str, model: Model):
        self.device, self.model = torch.device(name), model
        self.is_cuda = self.device.type == "cuda"
        self.info = self._describe()
        weights = int(model.num_params)
        self.pool = torch.empty(max(weights, int(2 * self.info["cache_bytes"])), dtype=torch.bfloat16, device=name)
        self.pool.normal_(0, 0.05, generator=torch.Generator(name).manual_seed(0))  # 4 caches of bytes at least
        self.next = 0
        self.decoder: Decoder | None = None
        self.packed: tuple[tuple[int, int], list[Matrix]] = (0, 0), []
        """the matrices of the last linear layer's shape"""

    def _describe(self) -> dict[str, Any]:
        common = {"torch": torch.__version__, "python": platform.python_version(), "stack": "torch"}
        if not self.is_cuda:
            caches = [_cache_bytes(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
            memory = _meminfo() or 8 * 2**30
            return common | {"device": _cpu_name(), "driver": platform.release(), "threads": torch.get_num_threads(),
                             "cache_bytes": max([*caches, LEAST_CACHE]), "memory_bytes": memory,
                             "devices": 1}  # fmt: skip
        found = torch.cuda.get_device_properties(self.device)
        self.uuid = f"GPU-{found.uuid}"  # nvidia-smi counts devices that CUDA_VISIBLE_DEVICES hides
        driver = _nvidia_smi("driver_version", self.uuid) or f"CUDA {torch.version.cuda}"
        return common | {
            "device": found.name, "driver": driver, "cuda": torch.version.cuda, "num_sms": found.multi_processor_count,
            "cache_bytes": getattr(found, "L2_cache_size", 0) or 64 * 2**20, "memory_bytes": found.total_memory,
            "devices": torch.cuda.device_count(),
        }  # fmt: skip

    @torch.inference_mode()
    def sample(self, case: Case, samples: int) -> list[float]:
        """Seconds per pass of the case, `samples` times, after warming up. Unsupported, or torch's own errors."""
        if case.kind.startswith("launch"):
            return self._launches(case.kind == "launch_graph", samples)
        with self._prepared(case) as call:
            output = call()
            _check_finite(output)
            once = self._time(call, 1)
            least = CUDA_SAMPLE if self.is_cuda else CPU_SAMPLE
            calls = max(1, min(MOST_CALLS, int(least / max(once, 1e-7))))
            captured = self.is_cuda and case.kind != "all_reduce"
            run, repeat = (self._captured(call, calls), 1) if captured else (call, calls)
            first = [once] if calls == 1 and not captured else []
            return first + [self._time(run, repeat) * repeat / calls for _ in range(samples - len(first))]

    def _time(self, run: Callable[[], Any], repeat: int) -> float:
        """Seconds per run."""
        if not self.is_cuda:
            clock = time.thread_time if self.info["threads"] == 1 else time.perf_counter
            started = clock()
            for _ in range(repeat):
                run()
            return (clock() - started) / repeat
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(repeat):
            run()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3 / repeat

    def _captured(self, call: Callable[[], Any], calls: int) -> Callable[[], Any]:
        """`calls` calls as one CUDA graph, warmed up: no launch overhead is left in the time."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                call()
        graph.replay()
        return graph.replay

    def _launches(self, graph: bool, samples: int) -> list[float]:
        """Seconds from one tiny kernel to the next: queued one by one, or in a graph (on a CPU both are calls)."""
        tiny = torch.zeros(TINY, dtype=torch.bfloat16, device=self.device)
        if not self.is_cuda or not graph:
            self._time(lambda: tiny.add_(1), 200)
            return [self._time(lambda: tiny.add_(1), MOST_CALLS) for _ in range(samples)]
        run = self._captured(lambda: tiny.add_(1), MOST_CALLS)
        return [self._time(run, 1) / MOST_CALLS for _ in range(samples)]

    @contextmanager
    def _prepared(self, case: Case) -> Iterator[Callable[[], torch.Tensor]]:
        """The case as a call; what it holds is freed afterwards."""
        try:
            yield getattr(self, f"_{case.kind}")(case)
        except (NotImplementedError, AttributeError) as error:
            raise Unsupported(f"this torch cannot: {_first_line(error)}") from None
        finally:
            if self.is_cuda and case.kind in ("step", "layer", "decode", "prefill"):
                torch.cuda.empty_cache()

    def lost(self) -> bool:
        """Whether the device runs nothing any more: after a fault of a kernel CUDA fails whatever follows."""
        try:
            torch.zeros(1, device=self.device).item()
        except RuntimeError as error:
            return not _is_memory(error)
        return False

    def take(self, *shape: int) -> torch.Tensor:
        """The next view of this shape in the pool; over its end it begins again."""
        size = 1
        for extent in shape:
            size *= extent
        if size > len(self.pool):
            raise Unsupported(f"{size * 2 / 1e9:.1f} GB are more than the pool of {len(self.pool) * 2 / 1e9:.1f} GB")
        if self.next + size > len(self.pool):
            self.next = 0
        view = self.pool[self.next : self.next + size].view(shape)
        self.next += size
        return view

    def matrix(self, n: int, k: int) -> Matrix:
        """x [tokens, k] -> its product with the pool's next view [n, k]. On a CPU it is packed as oneDNN wants it,
        once, as servers do when they load weights: F.linear packs it in every call."""
        weight = self.take(n, k)
        if self.is_cuda or not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
            return lambda x: F.linear(x, weight)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return lambda x: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, device=self.device).mul_(0.05).bfloat16()

    # --- one method per kind of case ----------------------------------------------------------------------------------
    def _copy(self, case: Case) -> Callable[[], torch.Tensor]:
        half = len(self.pool) // 2
        self.info["copy_bytes"] = 4 * half  # read and written
        target = torch.empty(half, dtype=torch.bfloat16, device=self.device)
        return lambda: target.copy_(self.pool[:half])

    def _linear(self, case: Case) -> Callable[[], torch.Tensor]:
        n, k, m = (case.shape[name] for name in ("outputs", "inputs", "tokens"))
        if case.dtype == "bf16":
            x = self._random(m, k)
            if self.is_cuda:
                return lambda: self.matrix(n, k)(x)
            if self.packed[0] != (n, k):
                self.packed = (n, k), [self.matrix(n, k) for _ in range(self._copies(2 * n * k))]
            matrices = itertools.cycle(self.packed[1])
            return lambda: next(matrices)(x)
        if case.dtype == "fp16":  # the pool's bits read as fp16: between 1 and 2, mostly
            x = self._random(m, k).half()
            return lambda: F.linear(x, self.take(n, k).view(torch.float16))
        if case.dtype == "fp32":
            x = self._random(m, k).float()
            return lambda: F.linear(x, self.take(n, 2 * k).view(torch.float32))
        make = {"fp8": self._fp8, "int8": self._int8, "int4": self._int4}[case.dtype]
        copies = self._copies(n * k)
        try:
            calls = make(m, n, k, copies)
            calls[0]()
        except (NotImplementedError, AttributeError, ValueError) as error:
            raise Unsupported(f"no {case.dtype} kernel: {_first_line(error)}") from None
        except RuntimeError as error:
            if _is_memory(error):
                raise
            raise Unsupported(f"no {case.dtype} kernel: {_first_line(error)}") from None
        turn = iter(range(2**62))
        return lambda: calls[next(turn) % len(calls)]()

    def _copies(self, size: int) -> int:
        """Of a weight of so many bytes, that together are more than the caches hold."""
        return max(1, min(64, int(2 * self.info["cache_bytes"] / size)))

    def _fp8(self, m: int, n: int, k: int, copies: int) -> list[Callable]:
        if not self.is_cuda:
            raise Unsupported("a CPU has no fp8 arithmetic")
        one = torch.ones((), device=self.device)
        x, weight = self._random(m, k).to(torch.float8_e4m3fn), self._random(n, k).to(torch.float8_e4m3fn)
        weights = [weight.clone() for _ in range(copies)]
        how: dict[str, Any] = {
            "out_dtype": torch.bfloat16,
            "use_fast_accum": True,
        }  # as the kernels of inference engines
        return [lambda w=w: torch._scaled_mm(x, w.t(), one, one, **how) for w in weights]

    def _int8(self, m: int, n: int, k: int, copies: int) -> list[Callable]:
        if m <= 16 and self.is_cuda:
            raise Unsupported("torch._int_mm needs more than 16 rows")
        x, weight = (torch.randint(-127, 127, (rows, k), dtype=torch.int8, device=self.device) for rows in (m, n))
        return [lambda w=w: torch._int_mm(x, w.t()) for w in [weight.clone() for _ in range(copies)]]

    def _int4(self, m: int, n: int, k: int, copies: int) -> list[Callable]:
        x, scales = self._random(m, k), self._random(k // INT4_GROUP, n, 2)
        if self.is_cuda:
            raw = torch.randint(0, 255, (n, k // 2), dtype=torch.uint8, device=self.device)
            packed, multiply = torch._convert_weight_to_int4pack(raw, 8), torch._weight_int4pack_mm
        else:
            raw = torch.randint(0, 15, (n, k), dtype=torch.int32)
            packed, multiply = torch._convert_weight_to_int4pack_for_cpu(raw, 8), torch._weight_int4pack_mm_for_cpu
        weights = [packed.clone() for _ in range(copies)]
        return [lambda w=w: multiply(x, w, INT4_GROUP, scales) for w in weights]

    def _prefill(self, case: Case) -> Callable[[], torch.Tensor]:
        s = case.shape
        q = self._random(s["sequences"], s["heads"], s["tokens"], s["head_dim"])
        k, v = (self._random(s["sequences"], s["kv_heads"], s["tokens"], s["head_dim"]) for _ in "kv")
        return lambda: attention(q, k, v)

    def _decode(self, case: Case) -> Callable[[], torch.Tensor]:
        if case.dtype == "fp8":
            raise Unsupported("torch has no fused attention over an fp8 KV cache")
        s = case.shape
        q = self._random(s["sequences"], s["heads"], 1, s["head_dim"])
        return lambda: attention(q, *self.take(2, s["sequences"], s["kv_heads"], s["context"], s["head_dim"]))

    def _norm(self, case: Case) -> Callable[[], torch.Tensor]:
        h = self.model.hidden_size
        x, residual, weight = self._random(case.shape["tokens"], h), self._random(case.shape["tokens"], h), self.take(h)
        return lambda: norm(x, residual, weight)[0]

    def _activation(self, case: Case) -> Callable[[], torch.Tensor]:
        x = self._random(case.shape["tokens"], 2 * self.model.layers[0].mlp.intermediate_size)
        return lambda: activation(x)

    def _sample(self, case: Case) -> Callable[[], torch.Tensor]:
        logits = self._random(case.shape["tokens"], self.model.vocab_size)
        return lambda: sample(logits)

    def _layer_elementwise(self, case: Case) -> Callable[[], torch.Tensor]:
        return self._model().elementwise(case.shape["tokens"])

    def _layer(self, case: Case) -> Callable[[], torch.Tensor]:
        return self._model().layer_step(*(case.shape[name] for name in ("sequences", "context", "prompt")))

    def _step(self, case: Case) -> Callable[[], torch.Tensor]:
        return self._model().step(*(case.shape[name] for name in ("sequences", "context", "prompt")))

    def _model(self) -> Decoder:
        if self.decoder is None:
            self.next = 0
            self.decoder = Decoder(self.model, self.take, self.matrix, self.device)
        return self.decoder

    def _flex_window(self, case: Case) -> Callable[[], torch.Tensor]:
        return self._flex(case.shape["tokens"], case.shape["tokens"] // 4)

    def _flex_paged(self, case: Case) -> Callable[[], torch.Tensor]:
        return self._flex(case.shape["tokens"], 0)

    def _flex(self, tokens: int, window: int) -> Callable[[], torch.Tensor]:
        """FlexAttention, compiled: a causal window over a prompt, or one query over pages in random order."""
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        attention = self.model.layers[0].attention
        queries = tokens if window else 1
        q = self._random(1, attention.num_heads, queries, attention.head_dim)
        k, v = (self._random(1, attention.num_kv_heads, tokens, attention.head_dim) for _ in "kv")
        page = torch.randperm(tokens // BLOCK_SIZE, device=self.device)

        def windowed(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

        def paged(b, h, q_idx, kv_idx):
            return page[kv_idx // BLOCK_SIZE] * BLOCK_SIZE + kv_idx % BLOCK_SIZE < tokens

        started = time.perf_counter()
        try:
            mask = create_block_mask(windowed if window else paged, None, None, queries, tokens, device=self.device)
            compiled = torch.compile(flex_attention, dynamic=False)
            compiled(q, k, v, block_mask=mask, enable_gqa=True)
        except Exception as error:
            raise Unsupported(f"FlexAttention does not compile here: {_first_line(error)}") from None
        took = round(time.perf_counter() - started, 1)  # later rounds find it compiled
        self.info.setdefault(f"flex_{'window' if window else 'paged'}_compile_s", took)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=True)

    def _all_reduce(self, case: Case) -> Callable[[], torch.Tensor]:
        """NCCL over all devices of this process; launched one by one, as a graph does not span devices."""
        from torch.cuda import nccl

        elements = case.shape["bytes"] // 2
        parts = [torch.zeros(elements, dtype=torch.bfloat16, device=f"cuda:{i}") for i in range(case.shape["devices"])]

        def call() -> torch.Tensor:
            nccl.all_reduce(parts)
            return parts[self.device.index or 0]

        return call

    def power(self) -> dict[str, float]:
        """Watts and SM clock in MHz under a large multiplication; empty where no driver says."""
        if not self.is_cuda or not _nvidia_smi("power.draw", self.uuid):
            return {}
        x, weight = self._random(8192, 8192), self._random(8192, 8192)
        started, seen = time.perf_counter(), []
        while time.perf_counter() - started < POWER_SECONDS:
            for _ in range(50):
                F.linear(x, weight)
            seen.append([_nvidia_smi(key, self.uuid) for key in ("power.draw", "clocks.sm")])
        torch.cuda.synchronize(self.device)
        try:
            watts, clock = (max(float(row[i]) for row in seen) for i in range(2))
        except (TypeError, ValueError):
            return {}
        return {"power_w": watts, "sm_clock_mhz": clock}


def _check_finite(output: torch.Tensor) -> None:
    if output.is_floating_point() and not bool(torch.isfinite(output).all()):
        raise Unsupported("the kernel's output is not finite")


def _is_memory(error: BaseException) -> bool:
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "memory" in str(error).lower()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


def _nvidia_smi(key: str, device: str) -> str:
    try:
        command = ["nvidia-smi", f"--query-gpu={key}", "--format=csv,noheader,nounits", "-i", device]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _cache_bytes(path: Path) -> int:
    try:
        text = path.read_text().strip()
        return int(text.rstrip("KMG")) * {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1], 1)
    except (OSError, ValueError):
        return 0


def _meminfo() -> int:
    try:
        first = Path("/proc/meminfo").read_text().split("\n", 1)[0]
        return int(first.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0
