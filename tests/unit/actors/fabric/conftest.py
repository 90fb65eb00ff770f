"""The fabric's controller on a stage: the switch is the emulated one, time jumps."""

import asyncio

import pytest

from rubato.actors.fabric.controller import FabricController
from rubato.actors.fabric.emulated import EmulatedSwitch
from rubato.actors.fabric.section import FabricSection
from rubato.actors.messages.fabric import Circuit, FindSwitch, InspectFabric, SwitchRequest
from rubato.actors.messages.phases import PhaseIntent

ROLLOUT = (("llm_proxy-1", "engine-1", 1000), ("llm_proxy-1", "engine-2", 900))
SYNC = (("trainer-1", "engine-1", 5000), ("trainer-1", "engine-2", 5000))


class Scene:
    def __init__(self, context, section):
        self.context, self.section = context, section
        self.controller = FabricController(FabricController.Config(fabric=section), context)
        self.start_switch()
        self.number = 0

    def start_switch(self):
        self.switch = switch = EmulatedSwitch(EmulatedSwitch.Config(fabric=self.section), self.context)

        async def answer(request):
            match request:
                case SwitchRequest():
                    return await switch.switch_request(request)
                case FindSwitch():
                    return await switch.find_switch(request)

        self.context.actors["optical_switch"] = answer

    async def begins(self, phase, traffic=(), in_s=0.0):
        await self.controller.phase_intent(PhaseIntent(phase, self.number, in_s, traffic))

    async def iteration(self, rollout_s=1.0, sync_s=0.5, rollout=ROLLOUT, sync=SYNC):
        self.number += 1
        await self.begins("rollout", rollout)
        await asyncio.sleep(rollout_s)
        await self.begins("weight_sync", sync)
        await asyncio.sleep(sync_s)

    async def report(self):
        return await self.controller.inspect_fabric(InspectFabric())

    def circuits(self):
        return tuple(Circuit(*cross) for cross, status in self.switch.device.status().items() if status == "tuned")


@pytest.fixture
def scene(on_stage):
    def run(play, store=None, incarnation=1, **section):
        async def main(context):
            context.incarnation = incarnation
            stage = Scene(context, FabricSection(**section))
            await stage.controller.on_start()
            await play(stage)

        on_stage(main, name="fabric_controller-1", store=store)

    return run
