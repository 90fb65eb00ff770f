"""Which driver a config opens, and what of it is refused."""

import pytest
from pydantic import ValidationError

from actors.fabric.connect import device, ssh
from actors.fabric.errors import BadCredentials
from actors.fabric.netconf import NetconfDriver
from actors.fabric.polatis import PolatisDriver
from actors.fabric.section import FabricSection
from actors.fabric.sonic import SonicDriver


@pytest.mark.parametrize(
    ("driver", "url", "kind"),
    [
        ("sonic", "https://switch", SonicDriver),
        ("polatis", "http://switch:8008", PolatisDriver),
        ("netconf", "ssh://admin@switch:830", NetconfDriver),
    ],
)
async def test_each_driver_has_its_kind_of_address(driver, url, kind):
    section = FabricSection(driver=driver, switch_url=url, ports=320)

    made = device(section)

    assert isinstance(made, kind)
    assert made.capabilities == (320, 0.010)
    await made.close()


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"driver": "netconf", "switch_url": "https://switch"}, "netconf takes ssh://"),
        ({"driver": "sonic", "switch_url": "ssh://switch"}, "is not for driver 'sonic'"),
        ({"driver": "polatis"}, "'polatis' needs switch_url"),
        ({"listen": "0.0.0.0:80"}, "no loopback address"),
        ({"listen": ":80"}, "no loopback address"),
        ({"listen": "127.0.0.1"}, "no loopback address"),
        ({"listen": "127.0.0.1:x"}, "no loopback address"),
        ({"listen": "127.0.0.1:65536"}, "no loopback address"),
    ],
)
def test_what_can_not_be_meant_is_refused(values, sentence):
    with pytest.raises(ValidationError, match=sentence):
        FabricSection(**values)


def test_a_password_file_that_is_not_there_is_named(tmp_path):
    section = FabricSection(switch_url="https://switch", switch_user="a", switch_password_file=str(tmp_path / "none"))

    with pytest.raises(BadCredentials, match=r"fabric\.switch_password_file: .*none"):
        device(section)


def test_ssh_asks_nothing_and_takes_no_option_from_the_address():
    assert ssh("ssh://admin@switch") == (
        "ssh",
        "-o",
        "BatchMode=yes",
        "-p",
        "830",
        "-s",
        "--",
        "admin@switch",
        "netconf",
    )
    assert "--" in ssh("ssh://-oProxyCommand=x:22")[: ssh("ssh://-oProxyCommand=x:22").index("netconf") - 1]
