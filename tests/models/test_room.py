"""Which loaded models have to go for another one; on machines that are only described."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from nemolocal.errors import DoesNotFitError
from nemolocal.hardware import Gpu, Hardware
from nemolocal.models import room, sizing
from nemolocal.models.choice import Candidate
from nemolocal.models.room import PlanOn, Room, Tenant
from nemolocal.models.sizing import Plan, Wish
from tests.models.plan_cases import GIB, OLD_3090, RTX_3060, RTX_4090, SECOND_4090, even, gpu, machine

N_CTX = 8192  # 1 GiB of cache for the models of `even`


def planner(*candidates: Candidate, n_ctx: int = N_CTX, n_slots: int = 4) -> PlanOn:
    return lambda hardware: sizing.plan("m", candidates, hardware, Wish(n_ctx=n_ctx, n_slots=n_slots))


class Machine:
    """Models loaded one after another; what is free is what they left over."""

    def __init__(self, hardware: Hardware, loaded: Sequence[PlanOn], in_use: Sequence[int] = ()) -> None:
        self.hardware = hardware
        self.plans: list[Plan] = []
        self.in_use = in_use
        for plan_on in loaded:
            self.plans.append(plan_on(self.hardware))
            self.hardware = room.without(self.hardware, [room.footprint(self.plans[-1])])

    def room_for(self, plan_on: PlanOn, *, n_most: int = 0) -> Room:
        tenants = [Tenant(room.footprint(plan), i not in self.in_use) for i, plan in enumerate(self.plans)]
        return room.find(plan_on, self.hardware, tenants, n_most=n_most)


def test_a_model_that_fits_beside_the_others_sends_nobody_away() -> None:
    small = planner(even("Q4_K_M", 5))
    found = Machine(machine(RTX_4090), [small, small]).room_for(small)
    assert found.leaving == ()
    assert found.plan.placement.is_whole
    assert Machine(machine(RTX_4090), []).room_for(small).leaving == ()


def test_the_least_recently_used_goes_and_no_more_than_are_needed() -> None:
    six, ten = planner(even("Q4_K_M", 4.6)), planner(even("Q4_K_M", 10))
    full = Machine(machine(RTX_4090), [six, six, six])
    assert full.room_for(six).leaving == (0,)
    assert full.room_for(ten).leaving == (0, 1)
    # The first would not be enough and the second is enough alone: the first stays.
    assert Machine(machine(RTX_4090), [planner(even("Q4_K_M", 2)), ten, six]).room_for(ten).leaving == (1,)


def test_models_in_use_go_last() -> None:
    six = planner(even("Q4_K_M", 4.6))
    loaded = [six, six, six]
    assert Machine(machine(RTX_4090), loaded, in_use=[0, 1]).room_for(six).leaving == (2,)
    assert Machine(machine(RTX_4090), loaded, in_use=[0, 1, 2]).room_for(six).leaving == (0,)


def test_only_those_on_the_right_card_go() -> None:
    big = planner(even("Q4_K_M", 16))
    full = Machine(machine(RTX_4090, SECOND_4090, ram_gib=8), [big, big])
    assert {plan.placement.gpus[0].uuid for plan in full.plans} == {RTX_4090.uuid, SECOND_4090.uuid}
    found = full.room_for(big)
    assert found.leaving == (0,)
    assert found.plan.placement.gpus[0].uuid == full.plans[0].placement.gpus[0].uuid


def test_layers_on_the_cpu_are_no_room_but_a_lower_quantization_is() -> None:
    full = Machine(machine(RTX_3060, ram_gib=64), [planner(even("Q4_K_M", 5))])
    assert full.room_for(planner(even("Q4_K_M", 5))).leaving == (0,)
    choice = planner(even("Q4_K_M", 5), even("IQ3_S", 2))
    found = full.room_for(choice)
    assert (found.leaving, found.plan.candidate.quant) == ((), "IQ3_S")
    poor = planner(even("Q4_K_M", 5), even("IQ1_S", 1))
    found = full.room_for(poor)
    assert (found.leaving, found.plan.candidate.quant) == ((0,), "Q4_K_M")


def test_a_model_too_large_for_the_card_gets_as_much_of_it_as_alone() -> None:
    large = planner(even("Q4_K_M", 20))
    hardware = machine(RTX_3060, ram_gib=64)
    alone = large(hardware)
    assert 0 < alone.placement.n_gpu_layers < 33
    found = Machine(hardware, [planner(even("Q4_K_M", 2))]).room_for(large)
    assert found.leaving == (0,)
    assert found.plan.placement.n_gpu_layers == alone.placement.n_gpu_layers


def test_on_a_cpu_ram_is_what_counts() -> None:
    small, large = planner(even("Q4_K_M", 3)), planner(even("Q4_K_M", 13))
    full = Machine(machine(ram_gib=16), [small, small])
    assert full.room_for(small).leaving == ()
    assert full.room_for(large).leaving == (0, 1)
    assert Machine(machine(ram_gib=16), [small]).room_for(large).leaving == (0,)


def test_context_does_not_give_way_on_a_cpu_while_others_only_idle() -> None:
    free = planner(even("Q4_K_M", 4), n_ctx=0)
    full = Machine(machine(ram_gib=9.8), [planner(even("Q4_K_M", 4), n_ctx=2048)])
    assert free(full.hardware).load.n_ctx < N_CTX
    found = full.room_for(free)
    assert (found.leaving, found.plan.load.n_ctx) == ((0,), N_CTX)


def test_nobody_goes_for_a_model_that_would_not_fit_alone() -> None:
    full = Machine(machine(ram_gib=16), [planner(even("Q4_K_M", 3))])
    with pytest.raises(DoesNotFitError):
        full.room_for(planner(even("Q4_K_M", 30)))


def test_a_limit_to_how_many() -> None:
    small = planner(even("Q4_K_M", 2))
    full = Machine(machine(RTX_4090), [small, small])
    assert full.room_for(small, n_most=3).leaving == ()
    assert full.room_for(small, n_most=2).leaving == (0,)
    assert full.room_for(small, n_most=1).leaving == (0, 1)


def test_a_card_without_memory_of_its_own_is_ram() -> None:
    shared: Gpu = replace(gpu(0, "NVIDIA GB10", 64, 60), shares_ram=True)
    hardware = machine(shared, ram_gib=60)
    plan = planner(even("Q4_K_M", 8))(hardware)
    taken = room.footprint(plan)
    assert (taken.gpu_bytes, taken.ram_bytes) == ((), plan.placement.ram_bytes)
    left = room.without(hardware, [taken])
    assert left.gpus[0].free_bytes == 60 * GIB - taken.ram_bytes == left.ram.available_bytes
    assert room.given_back(left, [taken]) == hardware


def test_views_never_leave_what_is_possible() -> None:
    hardware = machine(OLD_3090, ram_gib=16)
    huge = room.Footprint(((OLD_3090.uuid, 100 * GIB), ("GPU-gone", 1)), 100 * GIB)
    nothing = room.without(hardware, [huge])
    assert (nothing.gpus[0].free_bytes, nothing.ram.available_bytes) == (0, 0)
    all_of_it = room.given_back(hardware, [huge])
    assert (all_of_it.gpus[0].free_bytes, all_of_it.ram.available_bytes) == (24 * GIB, 16 * GIB)
    less = room.cautious(hardware, GIB)
    assert (less.gpus[0].free_bytes, less.ram.available_bytes) == (22 * GIB, 15 * GIB)
