"""Turns an ONNX file into an ONNX Runtime engine for this machine's CPU, and that engine into outputs.

The engine is the ONNX file after ONNX Runtime's own offline optimization (level "extended"), saved as ONNX: it loads
with any ONNX Runtime of the same version, its bytes depend on nothing but the model and the version, and its operators
can be read back. The level above, "all", packs tensors for one CPU's vector width; it is applied when the engine is
loaded. The ORT flat format would save some parsing and hide the operators.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx

from enginesmith.tasks.engines.lowering import lower_for_onnxruntime
from enginesmith.tasks.engines.manifest import verified_manifest
from enginesmith.tasks.engines.precision import Request, load_model, requests
from enginesmith.tasks.engines.spec import (
    BuildRequest,
    Built,
    EngineError,
    Manifest,
    NodePrecision,
    Option,
    Profile,
    Progress,
    Refusal,
    TensorSpec,
    Tick,
)

if TYPE_CHECKING:
    import onnxruntime as ort

ENGINE = "engine.onnx"
EXTERNAL_ABOVE = 1_500_000_000
LOWERED_TOLERANCE = 1e-3
LOWERED_NOISE = 4.0
"""How many times the graph's own rounding noise its lowered form may differ."""
LOWERED_DRAWS = 4
"""How often that noise is drawn."""

_INTEGER_OPS = frozenset({
    "QLinearConv", "ConvInteger", "QGemm", "QLinearMatMul", "MatMulInteger", "MatMulIntegerToFloat",
    "QLinearConvTranspose",
    "QLinearAdd", "QLinearMul", "QLinearConcat", "QLinearAveragePool",
    "QLinearGlobalAveragePool", "QLinearLeakyRelu", "QLinearSigmoid", "QLinearSoftmax", "QLinearWhere",
    "QLinearReduceMean",
})  # fmt: skip
_DISTRIBUTIONS = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
_NODE = re.compile(r"for (?P<op>\w+)\(\d+\) node with name '(?P<node>[^']*)'")
_NUMPY = {
    "tensor(float)": "float32",
    "tensor(double)": "float64",
    "tensor(float16)": "float16",
    "tensor(bool)": "bool",
}


class OnnxRuntime:
    """ONNX Runtime's CPU provider.

    It executes FP32 and, as integers, INT8 Q/DQ. FP16 it computes in FP32 with the roundings in between left out, so it
    neither builds nor executes a variant with FP16 in it.
    """

    name = "onnxruntime"
    extra = ""
    options = (Option("threads", "int", 0, "threads inside one operator; 0 is one per physical core"),)

    def version(self) -> str | None:
        """Version of the installed distribution, whichever flavour it is."""
        for distribution in _DISTRIBUTIONS:
            with suppress(metadata.PackageNotFoundError):
                return metadata.version(distribution)
        return None

    def fingerprint(self) -> dict[str, str]:
        """Version, operating system and architecture. The engine is the same on every CPU of an architecture."""
        return {
            "onnxruntime": self.version() or "none",
            "system": platform.system(),
            "machine": platform.machine(),
            "provider": "CPUExecutionProvider",
        }

    def builds(self) -> frozenset[str]:
        """fp32 and int8."""
        return frozenset({"fp32", "int8"})

    def executes(self) -> frozenset[str]:
        """fp32 and int8, when ONNX Runtime is installed."""
        return self.builds() if self.version() else frozenset()

    def check(self, model: Path) -> tuple[Refusal, ...]:
        """The first node that ONNX Runtime has no kernel for; it stops there."""
        import onnxruntime as ort

        try:
            ort.InferenceSession(str(model), _options("DISABLE_ALL"), providers=["CPUExecutionProvider"])
        except Exception as error:  # its classes are private, and it raises several
            text = str(error).strip()
            found = _NODE.search(text)
            return (Refusal(found["node"] if found else "", found["op"] if found else "", text),)
        return ()

    def compile(self, request: BuildRequest, out: Path, say: Tick) -> Built:
        """Lower INT8 to what the kernels run as integers, optimize, save, and read the operators back."""
        import onnxruntime as ort

        model = load_model(request.model)
        wanted = requests(model)
        _refuse_half(wanted, request)
        say(Progress("lowering"))
        lowering = lower_for_onnxruntime(model)
        source: str | bytes = str(request.model)
        if lowering.model is not model:
            _check_lowered(request.model, lowering.model, request.profiles[0])
            source = lowering.model.SerializeToString()
        say(Progress("optimizing"))
        options = _options("EXTENDED")
        options.optimized_model_filepath = str(out / ENGINE)
        files = [ENGINE]
        if _weight_bytes(model) > EXTERNAL_ABOVE:
            files.append(f"{ENGINE}.data")
            prefix = "session.optimized_model_external_initializers"
            options.add_session_config_entry(f"{prefix}_file_name", files[-1])
            options.add_session_config_entry(f"{prefix}_min_size_in_bytes", "1024")
        session = _session(ort, source, options, where=str(request.model))
        say(Progress("reading precision back"))
        return Built(
            files=tuple(files),
            inputs=_tensors(session.get_inputs()),
            outputs=_tensors(session.get_outputs()),
            layers=_read_back(wanted, load_model(out / ENGINE, weights=False)),
            read_from="the operators of the optimized graph that the session saved",
            lowered=lowering.notes,
        )

    def load(self, folder: Path) -> OnnxRuntimeEngine:
        """The engine, after its manifest was checked against this host."""
        manifest = verified_manifest(folder, backend=self.name, fingerprint=self.fingerprint())
        return OnnxRuntimeEngine(folder, manifest)


class OnnxRuntimeEngine:
    """A loaded ONNX Runtime engine.

    Sums of 8-bit products are kept exact on CPUs without VNNI too (``session.x64quantprecision``), kernels are chosen
    deterministically, and threads stop spinning when a run ends, so that two engines can be timed in turn.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        import onnxruntime as ort

        self.manifest = manifest
        options = _options("ALL")
        options.intra_op_num_threads = int(str(manifest.options.get("threads", 0)))
        self._ort = ort
        self._session = _session(ort, str(folder / ENGINE), options, where=str(folder))
        self._outputs = [o.name for o in manifest.outputs]

    def run(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Outputs by name."""
        return dict(zip(self._outputs, self._session.run(self._outputs, dict(feeds))))  # noqa: B905 - Python 3.10

    def prepare(self, feeds: Mapping[str, np.ndarray]) -> Callable[[], None]:
        """One inference per call, with inputs bound and outputs allocated before."""
        outputs = self.run(feeds)
        binding = self._session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, self._ort.OrtValue.ortvalue_from_numpy(np.ascontiguousarray(value)))
        for name, value in outputs.items():
            binding.bind_ortvalue_output(name, self._ort.OrtValue.ortvalue_from_numpy(value))
        session = self._session

        def infer() -> None:
            session.run_with_iobinding(binding)

        return infer

    def close(self) -> None:
        """Free the session."""
        self._session = None

    def __enter__(self) -> OnnxRuntimeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _options(level: str) -> ort.SessionOptions:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(
        ort.GraphOptimizationLevel, f"ORT_{level}" if level == "DISABLE_ALL" else f"ORT_ENABLE_{level}"
    )
    options.log_severity_level = 3
    options.use_deterministic_compute = True
    options.add_session_config_entry("session.x64quantprecision", "1")
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _session(ort: Any, model: str | bytes, options: ort.SessionOptions, *, where: str) -> Any:
    try:
        return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its classes are private, and it raises several
        raise EngineError(f"ONNX Runtime refuses the model: {str(error).strip()}", where=where) from error


def _refuse_half(wanted: Sequence[Request], request: BuildRequest) -> None:
    half = [r for r in wanted if r.precision in ("fp16", "bf16")]
    if half:
        raise EngineError(
            f"ONNX Runtime's CPU provider computes FP16 in FP32, so it cannot build the {request.variant} variant",
            where=str(request.model),
            details=[f"{r.node} ({r.op}): asks {r.precision}" for r in half[:10]],
            hint="measure this variant by emulation, or build it with a TensorRT backend",
        )


def _read_back(wanted: Sequence[Request], optimized: onnx.ModelProto) -> tuple[NodePrecision, ...]:
    """Precision of each node by the operator that bears its name in the optimized graph."""
    nodes = {node.name: node for node in optimized.graph.node}
    integers = sum(node.op_type in _INTEGER_OPS for node in optimized.graph.node)
    missing_is_float = integers < sum(r.anchor and r.precision == "int8" for r in wanted)
    rows = []
    for request in wanted:
        node = nodes.get(request.node)
        if node is not None:
            actual = "int8" if node.op_type in _INTEGER_OPS else "fp32"
        else:
            actual = "fp32" if missing_is_float and request.anchor and request.precision == "int8" else ""
        rows.append(
            NodePrecision(
                request.node,
                request.op,
                request.precision,
                actual,  # type: ignore[arg-type]
                f"{node.name} ({node.op_type})" if node is not None else "",
            )
        )
    return tuple(rows)


def _check_lowered(original: Path, lowered: onnx.ModelProto, profile: Profile) -> None:
    """Run both forms on one seeded input: they must compute the same, as far as the graph computes anything twice.

    A value that lies between two integers is rounded by the last bit of a sum. In a deep graph one such bit can change
    the output by percents. How much that is in this graph is measured: the original runs again with every scale of an
    activation moved by one rounding of FP32.
    """
    import onnxruntime as ort

    plain = _session(ort, str(original), _options("DISABLE_ALL"), where=str(original))
    changed = _session(ort, lowered.SerializeToString(), _options("DISABLE_ALL"), where=str(original))
    feeds = _random_feeds(plain.get_inputs(), profile)
    names = [o.name for o in plain.get_outputs()]
    expected, found = plain.run(names, feeds), changed.run(names, feeds)
    model, rng = load_model(original), np.random.default_rng(1)
    shaken = [
        _session(ort, _shaken(model, rng).SerializeToString(), _options("DISABLE_ALL"), where=str(original))
        for _ in range(LOWERED_DRAWS)
    ]
    others = [session.run(names, feeds) for session in shaken]
    for index, name in enumerate(names):
        error = _relative_l2(expected[index], found[index])
        noise = max(_relative_l2(expected[index], outputs[index]) for outputs in others)
        if not error <= max(LOWERED_TOLERANCE, LOWERED_NOISE * noise):
            raise EngineError(
                f"the INT8 graph and its form for ONNX Runtime differ at output {name!r}: relative error {error:.2g}, "
                f"against {noise:.2g} for one FP32 rounding of its scales",
                where=str(original),
                hint="this is a defect of the lowering, please report it with the model",
            )


def _shaken(model: onnx.ModelProto, rng: np.random.Generator) -> onnx.ModelProto:
    """The model with every activation's FP32 scale moved by one unit in the last place, up or down."""
    copy = onnx.ModelProto()
    copy.CopyFrom(model)
    scales = {node.input[1] for node in copy.graph.node if node.op_type == "QuantizeLinear"}
    for tensor in copy.graph.initializer:
        if tensor.name in scales and tensor.data_type == onnx.TensorProto.FLOAT:
            value = onnx.numpy_helper.to_array(tensor)
            moved = np.nextafter(value, np.where(rng.random(value.shape) < 0.5, np.inf, 0).astype(value.dtype))
            tensor.CopyFrom(onnx.numpy_helper.from_array(moved.astype(value.dtype), tensor.name))
    return copy


def _relative_l2(first: np.ndarray, second: np.ndarray) -> float:
    if np.array_equal(first, second, equal_nan=first.dtype.kind == "f"):
        return 0.0
    one, two = first.astype(np.float64), second.astype(np.float64)
    return float(np.linalg.norm(one - two) / max(float(np.linalg.norm(one)), 1e-30))


def _random_feeds(inputs: Sequence[Any], profile: Profile) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    feeds: dict[str, np.ndarray] = {}
    for item in inputs:
        dtype = np.dtype(_numpy_name(item.type))
        values = profile.values.get(item.name)
        if values is not None:
            feeds[item.name] = np.array(values.min, dtype)
        elif dtype.kind == "f":
            feeds[item.name] = rng.standard_normal(profile.shapes[item.name].min).astype(dtype)
        else:
            feeds[item.name] = rng.integers(0, 2, profile.shapes[item.name].min).astype(dtype)
    return feeds


def _tensors(items: Sequence[Any]) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(i.name, _numpy_name(i.type), tuple(d if isinstance(d, int) else None for d in i.shape))
        for i in items
    )


def _numpy_name(kind: str) -> str:
    return _NUMPY.get(kind, kind[len("tensor(") : -1])


def _weight_bytes(model: onnx.ModelProto) -> int:
    return sum(tensor.ByteSize() for tensor in model.graph.initializer)
