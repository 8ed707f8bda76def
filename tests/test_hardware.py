"""Claims about this host's facts."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import replace

import psutil
import pytest

from enginesmith.tasks.hardware import Host, cpu_flags, int8_note, this_host

X86 = Host("some CPU", 4, "x86_64", "Linux 6", 2**34, (), ("avx2",), (), "")


def test_the_facts_are_those_that_others_find() -> None:
    host = this_host()
    assert host.machine == platform.machine()
    assert host.memory_bytes == psutil.virtual_memory().total
    assert 1 <= host.cpus <= (os.cpu_count() or 1)
    assert json.loads(json.dumps(host.facts())) == host.facts()


@pytest.mark.skipif(platform.machine() != "x86_64" or platform.system() != "Linux", reason="reads x86 flag names")
def test_every_64_bit_x86_cpu_has_sse2() -> None:
    assert "sse2" in cpu_flags()


def test_int8_without_vnni_comes_with_a_note() -> None:
    assert "no VNNI" in int8_note(X86)


@pytest.mark.parametrize("changed", [{"int8_instructions": ("avx512_vnni",)}, {"machine": "aarch64"}])
def test_int8_elsewhere_needs_no_note(changed) -> None:
    assert int8_note(replace(X86, **changed)) == ""


def test_a_new_kernel_is_the_same_host_and_another_cpu_is_not() -> None:
    assert replace(X86, system="Linux 7").identity() == X86.identity()
    assert replace(X86, cpu="another").identity() != X86.identity()
