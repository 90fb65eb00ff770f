"""SimGrid as an independent judge of max-min rates: flow sets as JSON on stdin, the time at which each flow ends on stdout.

Runs under the system's Python, where Debian installs SimGrid. With latencies of zero its fluid model weights no flow by its round trip.
"""

import json
import sys

from simgrid import Actor, Engine, LinkInRoute, Mailbox, NetZone


def main() -> None:
    sets = json.load(sys.stdin)
    args = [
        "network/model:CM02",
        "network/TCP-gamma:0",
        "network/latency-factor:1",
        "network/bandwidth-factor:1",
        "network/weight-S:0",
        "network/crosstraffic:0",
        "network/loopback-lat:0",
    ]
    engine = Engine([sys.argv[0], *(f"--cfg={a}" for a in args), "--log=root.thres:critical"])
    zone = NetZone.create_full_zone("root")
    ends = {}

    def send(box, size):
        Mailbox.by_name(box).put(box, size)

    def get(box):
        Mailbox.by_name(box).get()
        ends[box] = Engine.clock

    for k, one in enumerate(sets):
        links = [zone.create_link(f"l{k}-{i}", rate).set_latency(0).seal() for i, rate in enumerate(one["capacity"])]
        for f, (hops, size) in enumerate(zip(one["hops"], one["sizes"], strict=True)):
            name = f"{k}-{f}"
            a, b = (zone.create_host(f"{end}{name}", 1e9).seal() for end in "ab")
            zone.add_route(a.netpoint, b.netpoint, None, None, [LinkInRoute(links[i]) for i in hops], True)
            Actor.create("s" + name, a, send, name, size)
            Actor.create("r" + name, b, get, name)
    zone.seal()
    engine.run()
    json.dump([[ends[f"{k}-{f}"] for f in range(len(one["sizes"]))] for k, one in enumerate(sets)], sys.stdout)


main()
