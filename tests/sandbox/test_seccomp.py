"""The filter of system calls, evaluated instruction by instruction for both machines."""

from __future__ import annotations

import errno
import struct

import pytest

from rollbook.sandbox.seccomp import DENIED, DENIED_SHARED, IGNORED_SHARED, filter_program


def evaluate(program: bytes, number: int, arch: int, argument: int = 0, second: int = 0) -> int:
    """What the kernel's interpreter of classic BPF would return."""
    data = struct.pack("<IIQ6Q", number, arch, 0, argument, second, 0, 0, 0, 0)
    accumulator, at = 0, 0
    while True:
        code, if_true, if_false, value = struct.unpack_from("<HBBI", program, at * 8)
        at += 1
        match code:
            case 0x20:
                accumulator = struct.unpack_from("<I", data, value)[0]
            case 0x06:
                return value
            case 0x54:
                accumulator &= value
            case _:
                holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
                at += if_true if holds else if_false


@pytest.mark.parametrize(
    ("machine", "arch", "clone", "prlimit", "harmless"),
    [("x86_64", 0xC000003E, 56, 302, (0, 1, 57, 59)), ("aarch64", 0xC00000B7, 220, 261, (63, 64, 93, 221))],
)
def test_the_filter_denies_its_list_on_both_machines_and_nothing_else(
    machine: str, arch: int, clone: int, prlimit: int, harmless: tuple[int, ...]
) -> None:
    program = filter_program(machine)
    allow, deny = 0x7FFF0000, 0x00050000 | errno.EPERM
    assert {evaluate(program, number, arch) for number in DENIED[machine].values()} == {deny}
    assert {evaluate(program, number, arch) for number in harmless} == {allow}
    assert evaluate(program, 435, arch) == 0x00050000 | errno.ENOSYS
    assert evaluate(program, clone, arch, 0x11) == allow and evaluate(program, clone, arch, 0x10000011) == deny
    assert evaluate(program, prlimit, arch, 0) == allow and evaluate(program, prlimit, arch, 1) == deny
    assert evaluate(program, 0, 0x40000003) == 0x80000000, "another machine's call table"
    if machine == "x86_64":
        assert evaluate(program, 0x40000000 | 1, arch) == deny, "x32"


ALLOW, DENY, IGNORE = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000
ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}


@pytest.mark.parametrize(
    ("machine", "calls", "priority", "io_priority"),
    [("x86_64", (142, 144, 203, 302, 314), 141, 251), ("aarch64", (118, 119, 122, 261, 274), 140, 30)],
)
def test_the_filter_lets_a_process_change_its_own_schedule_and_nobody_elses(
    machine: str, calls: tuple[int, ...], priority: int, io_priority: int
) -> None:
    program, arch = filter_program(machine), ARCHES[machine]
    assert {evaluate(program, number, arch, 0, 77) for number in calls} == {ALLOW}
    assert {evaluate(program, number, arch, 77, 0) for number in calls} == {DENY}
    for number, process in ((priority, 0), (io_priority, 1)):
        allowed = {(which, who) for which in range(4) for who in (0, 77) if evaluate(program, number, arch, which, who) == ALLOW}
        assert allowed == {(process, 0)}, "a group's and a user's are others' as well"


@pytest.mark.parametrize(("machine", "socketpair"), [("x86_64", 53), ("aarch64", 199)])
def test_the_filter_gives_connected_pairs_of_local_sockets_only(machine: str, socketpair: int) -> None:
    program, flags = filter_program(machine), 0o2004000
    allowed = {
        (family, kind) for family in (0, 1, 2, 30) for kind in range(16)
        if evaluate(program, socketpair, ARCHES[machine], family, kind | flags) == ALLOW
    }  # fmt: skip
    assert allowed == {(1, 1), (1, 5)}


@pytest.mark.parametrize(("machine", "prctl", "sendto"), [("x86_64", 157, 44), ("aarch64", 167, 206)])
def test_the_filter_of_shared_files_gives_none_another_owner_and_ignores_modes(machine: str, prctl: int, sendto: int) -> None:
    shared, own, arch = filter_program(machine, shared=True), filter_program(machine), ARCHES[machine]
    assert {evaluate(shared, number, arch) for number in DENIED_SHARED[machine].values()} == {DENY}
    assert {evaluate(shared, number, arch) for number in IGNORED_SHARED[machine].values()} == {IGNORE}
    assert [evaluate(shared, prctl, arch, option) for option in (4, 15)] == [DENY, ALLOW]
    assert {evaluate(shared, number, arch) for number in DENIED[machine].values()} == {DENY}
    calls = {**DENIED_SHARED[machine], **IGNORED_SHARED[machine], "sendto": sendto}.values()
    assert {evaluate(own, number, arch) for number in calls} == {ALLOW} and evaluate(shared, sendto, arch) == ALLOW
