"""What is read from machine code: loads in flight, by loops written out by hand whose answer is known."""

import pytest

from d3engine.kernels.machine_code import (
    LATENCY,
    barriers_of_the_last,
    before_the_wait,
    bytes_in_flight,
    cycles_alone,
    hottest_loop,
    instructions,
    instructions_a_byte,
    programs_a_processor,
    read_once,
    waits_before_streaming,
)


def sass(*lines: str, first: int = 0x100) -> str:
    """As cuobjdump prints it: an address before each instruction, its encoding behind and below it."""
    encoded = [
        f"        /*{first + 16 * nth:04x}*/                   {line} ;    /* 0x000000001c047981 */\n"
        "                                            /* 0x000fe200078e00ff */"
        for nth, line in enumerate(lines)
    ]
    return "\n".join(encoded)


def loads(count: int) -> list[str]:
    return [f"LDG.E.EF.128 R{20 + 4 * nth}, desc[UR4][R2.64+0x{nth}00]" for nth in range(count)]


def uses(count: int) -> list[str]:
    return [f"FFMA R4, R{23 + 4 * nth}, R5, R4" for nth in range(count)]


def test_loads_that_are_used_at_once_wait_one_after_another() -> None:
    pairs = [line for pair in zip(loads(4), uses(4), strict=True) for line in pair]
    assert bytes_in_flight(sass(*pairs, "@!P1 BRA 0x100")) == pytest.approx(16, rel=0.03)


def test_loop_of_few_rounds_has_less_in_flight_than_a_long_one() -> None:
    """A loop of few rounds has less under way in the mean than a long one."""
    # Of two rounds that each wait for their loads half of the time is one latency, and loads before it add theirs.
    code = sass(*loads(4), *uses(4), "@!P1 BRA 0x100")
    long = bytes_in_flight(code)
    assert bytes_in_flight(code, rounds=2) == pytest.approx(long, rel=0.02)
    assert bytes_in_flight(code, rounds=2, before=4) == pytest.approx(64 * 2 * 800 / (2 * 800 + 4 * 280), rel=0.02)
    copies = ["LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64], P0", "LDGDEPBAR", "DEPBAR.LE SB0, 0x3", "@P1 BRA 0x100"]
    pipelined = [bytes_in_flight(sass(*copies), rounds=rounds) for rounds in (2, 4, 24)]
    assert pipelined == sorted(pipelined)
    assert pipelined[0] < 0.5 * bytes_in_flight(sass(*copies))


def test_loads_used_after_the_last_are_in_flight_together() -> None:
    """Loads that are used after the last are in flight together."""
    assert bytes_in_flight(sass(*loads(4), *uses(4), "@!P1 BRA 0x100")) == pytest.approx(64, rel=0.05)


@pytest.mark.parametrize(("left", "stages"), [("0x0", 1), ("0x1", 2), ("0x3", 4)])
def test_asynchronous_copies_in_flight_are_groups_not_awaited(left: str, stages: int) -> None:
    """Asynchronous copies are in flight by as many groups as are not waited for."""
    copies = [f"LDGSTS.E.BYPASS.128 [R9+0x{nth}00], desc[UR4][R2.64], P0" for nth in range(4)]
    code = sass(*copies, "LDGDEPBAR", f"DEPBAR.LE SB0, {left}", "LDS.128 R20, [R9]", "@P1 BRA 0x100")
    assert bytes_in_flight(code) == pytest.approx(64 * stages, rel=0.1)


def test_unfilled_stages_and_cached_loads_do_not_count() -> None:
    """What fills no stage and what comes from the cache does not count."""
    cached = "LDG.E.EL.128 R60, desc[UR8][R2.64]"
    unread = "LDGSTS.E.BYPASS.128 [R9], desc[UR4][R2.64], !PT"
    assert bytes_in_flight(sass(cached, unread, "LDG.E R4, desc[UR8][R2.64]", "@P0 BRA 0x100")) == 0.0
    found = bytes_in_flight(sass(cached, *loads(1), unread, *uses(1), "@P0 BRA 0x100"))
    assert found == pytest.approx(16, rel=0.03)


def test_the_loop_that_loads_most_is_the_one_that_counts() -> None:
    code = sass(*loads(1), "@P0 BRA 0x100", *loads(3), "@P0 BRA 0x120", "EXIT", "BRA 0x170")
    assert [one.address for one in hottest_loop(instructions(code))] == [0x120, 0x130, 0x140, 0x150]
    straight = instructions(sass(*loads(2), "EXIT"))
    assert hottest_loop(straight) == straight


def test_instructions_are_counted_in_the_loading_loop() -> None:
    """Instructions are counted in the loop that loads, and by what a whole warp loads."""
    code = sass("MOV R4, RZ", *loads(2), *uses(5), "@P0 BRA 0x110", "EXIT")
    assert instructions_a_byte(code) == 8 / (32 * 32)
    assert instructions_a_byte(sass("MOV R4, RZ", "EXIT")) == 0.0


def test_loop_around_a_loading_one_does_not_count() -> None:
    """A loop around another that loads does not count, nor what others have just written."""
    code = sass(*loads(5), *loads(1), "@P0 BRA 0x150", "@P1 BRA 0x100", "EXIT")
    assert [one.address for one in hottest_loop(instructions(code))] == [0x150, 0x160]
    written = [load.replace(".EF.128", ".128.STRONG.GPU") for load in loads(4)]
    code = sass(*loads(1), "@P0 BRA 0x100", *written, *uses(4), "@P1 BRA 0x120", "EXIT")
    assert [one.address for one in hottest_loop(instructions(code))] == [0x100, 0x110]


def test_longer_latency_leaves_the_same_loads_in_flight() -> None:
    """A longer latency leaves the same loads in flight where waiting is all."""
    code = sass(*loads(4), *uses(4), "@!P1 BRA 0x100")
    assert bytes_in_flight(code, 10 * LATENCY) == pytest.approx(64, rel=0.01)


def test_programs_share_registers_shared_memory_and_threads() -> None:
    most = 227 * 1024
    assert programs_a_processor(128, 0, 4, most) == 4
    assert programs_a_processor(97, 0, 4, most) == 4  # as 104: registers come in eights
    assert programs_a_processor(32, 56 * 1024, 4, most) == 4
    assert programs_a_processor(32, 0, 8, most) == 8
    assert programs_a_processor(32, 0, 1, most) == 32


WEIGHTS = """
	createpolicy.fractional.L2::evict_first.b64 %rd2, 1.0;
	ld.global.L1::evict_first.L2::cache_hint.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ], %rd2;
	cp.async.cg.shared.global.L2::cache_hint [ %r16 + 0 ], [ %rd13 + 0 ], 0x10, %r17, %rd2;
"""
WAIT = "\tgriddepcontrol.wait;\n\tld.global.b32 %r1, [%rd3];\n\tst.global.b32 [%rd3], %r1;\n\tret;\n"


def test_weights_alone_may_be_loaded_before_a_kernel_waits() -> None:
    assert before_the_wait(WEIGHTS + WAIT) == []
    assert before_the_wait(WAIT) == []
    assert before_the_wait(WEIGHTS) == ["it never waits"]


def test_of_asynchronous_copies_those_of_8_bytes_count_too() -> None:
    copies = [f"LDGSTS.E.64 [R9+0x{nth}00], desc[UR4][R2.64], P0" for nth in range(4)]
    code = sass(*copies, "LDGDEPBAR", "DEPBAR.LE SB0, 0x0", "LDS.128 R20, [R9]", "@P1 BRA 0x100")
    assert bytes_in_flight(code) == pytest.approx(32, rel=0.1)


def test_shared_rows_differ_from_weights_by_cache_policy() -> None:
    """Rows that all programs read differ from weights by their stay in the cache."""
    copy = "\tcp.async.c{}.shared.global.L2::cache_hint [ %r16 + 0 ], [ %rd13 + 0 ], {}, %r17, {};\n"
    weights, rows = copy.format("a", "0x8", "%rd2"), copy.format("g", "0x10", "%rd3")
    scales = "\t@%p2 cp.async.ca.shared.global [ %r53 + 0 ], [ %rd18 + 0 ], 0x4, %r54;\n"
    policies = "\tcreatepolicy.fractional.L2::evict_first.b64 %rd2, 1.0;\n"
    assert read_once(policies + 4 * weights + rows + scales) == pytest.approx(32 / 48)
    wide = "\tld.global.L1::evict_first.L2::cache_hint.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ], %rd2;\n"
    assert read_once(policies + wide + rows + "\tld.global.b32 %r1, [ %rd3 + 0 ];\n") == pytest.approx(16 / 32)
    assert read_once(rows) == 1.0  # keys and values, which nothing marks


@pytest.mark.parametrize(
    "line",
    [
        "ld.global.b32 %r1, [ %rd3 + 0 ];",
        "@%p1 ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];",
        "cp.async.cg.shared.global.L2::cache_hint [ %r16 + 0 ], [ %rd13 + 0 ], 0x10, %r17, %rd22;",
        "st.global.b32 [ %rd3 + 0 ], { %r1 };",
        "@%p1 ret;",
    ],
)
def test_anything_else_before_it_is_named(line: str) -> None:
    (found,) = before_the_wait(f"{WEIGHTS}\t{line}\n{WAIT}")
    assert found in (line, "it returns")


def test_barriers_behind_a_counter_count_in_each_turn() -> None:
    """Barriers behind a counter count in each turn of their loops."""
    before = ["BAR.SYNC 0x0", "ATOMG.E.ADD.STRONG.GPU PT, R0, desc[UR4][R2.64], R5", "BAR.SYNC 0x0"]
    heads = ["MOV R9, R8", "BAR.SYNC 0x0", "@P0 BRA 0x140", "@P1 BRA 0x130", "BAR.SYNC 0x0", "@P2 BRA 0x100"]
    assert barriers_of_the_last(sass(*before, *heads), 4) == 1 + 16 + 1
    assert barriers_of_the_last(sass(*before, "BAR.SYNC 0x0", "@P0 BRA 0x130"), 4) == 1 + 4
    assert barriers_of_the_last(sass("BAR.SYNC 0x0", *heads), 4) == 0


def test_waits_before_a_loop_are_chains_of_loads_and_barriers() -> None:
    """Loads that are used together are one wait, and what stands before the loop around does not count."""
    chunks = ["LDG.E R8, desc[UR4][R2.64]", "LDG.E R9, desc[UR4][R2.64]", "IADD3 R10, R8, R9, RZ", "BAR.SYNC 0x0"]
    length = ["LDG.E R11, desc[UR4][R10.64]", "IMAD R2, R11, R5, RZ"]
    loop = [*loads(1), *uses(1)]
    head = ["LDG.E R6, desc[UR4][R2.64]", "IADD3 R7, R6, 0x1, RZ", "BAR.SYNC 0x0"]
    begin = 0x100 + 16 * (len(head) + len(chunks) + len(length))
    code = sass(*head, *chunks, *length, *loop, f"@P0 BRA {begin:#x}", "@P1 BRA 0x130", "EXIT")
    assert waits_before_streaming(code) == (2, 1)
    ids = ["LDGSTS.E [R9], desc[UR4][R2.64]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x0"]
    code = sass(*ids, *loop, "@P0 BRA 0x130", "@P1 BRA 0x100", "EXIT")
    assert waits_before_streaming(code) == (1, 0)
    assert waits_before_streaming(sass(*loop, "@P0 BRA 0x100", "EXIT")) == (0, 0)


def test_loop_around_another_goes_round_as_often_as_said() -> None:
    """A loop around another goes round as often as is said and others once."""
    inner = ["IADD3 R8, R8, 0x1, RZ", "@P0 BRA 0x100"]  # the first adds to what the round before has left
    lonely = [cycles_alone(sass(*inner), rounds) for rounds in (1, 9)]
    assert lonely[0] == lonely[1] > 0
    searching = [cycles_alone(sass("MOV R9, R8", *inner[:1], "@P0 BRA 0x110", "@P1 BRA 0x100"), n) for n in (1, 2, 5)]
    assert searching[2] - searching[1] == pytest.approx(3 * (searching[1] - searching[0]))
    assert searching[1] > searching[0]
