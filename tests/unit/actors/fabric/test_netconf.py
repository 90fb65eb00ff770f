"""NETCONF sessions with servers that are not there, break off, or answer something else; each is a program of a few lines."""

import sys

import pytest

from rubato.actors.fabric.driver import BadAnswer, BadCredentials, SwitchCapabilities, SwitchTimedOut, SwitchUnreachable
from rubato_ocs.netconf import BASE, OCS, NetconfDriver, NetconfSession

CAPABILITIES = SwitchCapabilities(8, 0.005)


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ("import sys; sys.exit('admin@switch: Permission denied (publickey).')", BadCredentials),
        ("import sys; sys.exit('connect to host switch port 830: Connection refused')", SwitchUnreachable),
        ("import time; time.sleep(60)", SwitchTimedOut),
        ("print('garbage]]>]]>', flush=True); import time; time.sleep(60)", BadAnswer),
        ("print('<hello/>]]>]]>', flush=True); import time; time.sleep(60)", BadAnswer),
        ("print('<?xml version=\\'1.0\\' encoding=\\'x\\'?><hello/>]]>]]>', flush=True); import time; time.sleep(60)", BadAnswer),
        ("import os, time; os.fork(); time.sleep(60)", SwitchTimedOut),
    ],
)
async def test_a_netconf_session_that_does_not_come_about_is_named(script, error):
    session = NetconfSession((sys.executable, "-c", script), timeout_s=2)

    with pytest.raises(error):
        await NetconfDriver(session, CAPABILITIES).read()
    await session.close()


SERVER = f"""
import sys
end = "]]>]]>"
print('<hello xmlns="{BASE}"/>' + end, end="", flush=True)
text = ""
for answer in {{answers}}:
    while not text.strip().endswith(end) or "<rpc" not in text:
        text += sys.stdin.read(1)
    number = text.rpartition('message-id="')[2].partition('"')[0]
    text = ""
    print(answer.format(number=number, next=int(number) + 1) + end, end="", flush=True)
sys.stdin.read()
"""
RIGHT = f'<rpc-reply message-id="{{number}}" xmlns="{BASE}"/>'
STALE = RIGHT.replace("/>", f'><pair xmlns="{OCS}"><ingress>1</ingress><egress>9</egress></pair></rpc-reply>')


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (RIGHT.replace("number", "next"), "a reply to message 2 instead of 1"),
        (RIGHT.replace(' message-id="{number}"', ""), "a reply to message None instead of 1"),
        (f'<notification xmlns="{BASE}"/>', "notification instead of rpc-reply"),
        (f'<rpc-reply message-id="{{number}}" xmlns="{BASE}"><x xmlns="{OCS}"><pair/></x></rpc-reply>', "a pair was answered"),
        (f'<rpc-reply message-id="{{number}}" xmlns="{BASE}"><x xmlns="{OCS}"><pair>{"<p>" * 5000}{"</p>" * 5000}</pair></x></rpc-reply>', "a pair was answered"),
    ],
)  # fmt: skip
async def test_an_answer_that_is_no_reply_to_ours_is_named_and_the_next_one_is_read_aright(answer, said):
    # A stranger's message comes before the reply: in the same session that reply would be the answer to the next request.
    late = answer if "pair" in answer else answer + "]]>]]>" + STALE
    first, after = (SERVER.format(answers=each) for each in ([late, RIGHT, RIGHT], [RIGHT, RIGHT]))
    session = NetconfSession((sys.executable, "-c", first), timeout_s=10)
    made = NetconfDriver(session, CAPABILITIES)

    with pytest.raises(BadAnswer, match=said):
        await made.read()
    session._command = (sys.executable, "-c", after)

    assert (await made.read()).circuits == {}
    assert (await made.read()).circuits == {}
    await made.close()


async def test_a_missing_ssh_is_named():
    with pytest.raises(SwitchUnreachable, match="not-there is not installed"):
        await NetconfSession(("not-there",), timeout_s=2).rpc("<get/>")
