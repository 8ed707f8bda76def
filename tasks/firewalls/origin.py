"""Turns a node's metadata into the module and the source line that it came from."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import onnx_ir as ir

from enginesmith.tasks.firewalls.findings import Finding

MODULE = "enginesmith.module"
"""Metadata key of a node: dotted path of its module below the model."""

SOURCE = "enginesmith.source"
"""Metadata key of a node: `file:line`, the file relative to the pipeline's folder or to the installed packages."""


def source_of(node: ir.Node) -> tuple[str, int]:
    """File and line of the source that a node came from; ("", 0) when unknown."""
    file, _, line = node.metadata_props.get(SOURCE, "").rpartition(":")
    return (file, int(line)) if file and line.isdigit() else ("", 0)


def module_of(node: ir.Node) -> str:
    """Dotted path of the module that a node came from; empty when unknown."""
    return node.metadata_props.get(MODULE, "")


@dataclass(frozen=True)
class Place:
    """Where in file, module and graph a node is, as a finding gives it."""

    file: str = ""
    line: int = 0
    node: str = ""
    module: str = ""

    @classmethod
    def of(cls, node: ir.Node | None) -> Place:
        """The place of a node; an empty one of None."""
        if node is None:
            return cls()
        file, line = source_of(node)
        return cls(file, line, str(node.name or ""), module_of(node))

    def put(self, finding: Finding) -> Finding:
        """The finding, at this place."""
        return finding.model_copy(update=asdict(self))
