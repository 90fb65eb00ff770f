"""Which driver a config opens, and what of it is refused."""

import ssl
from pathlib import Path
from types import SimpleNamespace

import certifi
import pytest
from pydantic import ValidationError

from rubato.actors.fabric.connect import device, trusted
from rubato.actors.fabric.controller import FabricController
from rubato.actors.fabric.driver import BadCredentials
from rubato.actors.fabric.restconf import SonicDriver
from rubato.actors.fabric.section import FabricSection
from rubato.runtime.errors import ConfigError
from rubato_ocs.netconf import NetconfDriver, ssh
from rubato_ocs.polatis import PolatisDriver


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
        ({"driver": "tl1", "switch_url": "https://switch"}, "tl1 is not sonic, polatis, netconf, nor a function"),
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


@pytest.mark.parametrize(
    ("driver", "url", "sentence"),
    [
        ("sonic", "https://[::1", "is no address"),
        ("sonic", "https://switch:99999", "is no address: Port out of range"),
        ("polatis", "http://switch:x", "is no address: Invalid port: 'x'"),
        ("sonic", "https://\x01", "is no address"),
        ("sonic", "https://", "names no host"),
        ("sonic", "https://switch:0", "names no port"),
        ("netconf", "ssh://admin@switch:99999", "is no address: Port out of range"),
        ("netconf", "ssh://", "names no host"),
        ("netconf", "ssh://admin@:830", "names no host"),
    ],
)
def test_an_address_that_leads_nowhere_is_refused_before_the_start(driver, url, sentence):
    with pytest.raises(ValidationError, match=sentence):
        FabricSection(driver=driver, switch_url=url)


@pytest.mark.parametrize(
    ("key", "content", "sentence"),
    [
        ("switch_password_file", None, "can't be read: No such file or directory"),
        ("switch_password_file", b"\xff\xfe", "is no text file in UTF-8"),
        ("switch_ca_file", None, "can't be read: No such file or directory"),
        ("switch_ca_file", b"", "holds no certificate in PEM"),
        ("switch_ca_file", b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n", "holds no certificate"),
    ],
)
def test_a_file_that_is_no_such_thing_is_named_at_the_start_and_when_it_is_needed(key, content, sentence, tmp_path):
    file = tmp_path / "file"
    if content is not None:
        file.write_bytes(content)
    section = FabricSection(switch_url="https://switch", switch_user="a", **{key: str(file)})

    with pytest.raises(ConfigError, match=rf"^fabric\.{key} .*file {sentence}.*\. Give another file"):
        FabricController.check_host(SimpleNamespace(fabric=section))
    with pytest.raises(BadCredentials, match=rf"^fabric\.{key} .*file {sentence}"):
        device(section)


async def test_the_authorities_of_the_ca_file_are_trusted_and_no_others(tmp_path):
    (tmp_path / "password").write_text("secret\n")
    some = tmp_path / "some.pem"
    some.write_text(Path(certifi.where()).read_text().partition("-----END CERTIFICATE-----\n")[0] + "-----END CERTIFICATE-----\n")
    section = FabricSection(switch_url="https://switch", switch_ca_file=str(some), switch_password_file=str(tmp_path / "password"))

    FabricController.check_host(SimpleNamespace(fabric=section))
    context = trusted(section)
    made = device(section)

    assert len(context.get_ca_certs()) == 1
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    await made.close()


def test_files_that_are_not_needed_are_not_looked_for():
    for values in ({"switch_url": "ssh://switch", "driver": "netconf"}, {"switch_url": "https://switch", "enabled": False}, {}):
        section = FabricSection(switch_ca_file="/none", switch_password_file="/none", **values)
        FabricController.check_host(SimpleNamespace(fabric=section))


def test_ssh_asks_nothing_and_takes_no_option_from_the_address():
    assert ssh("ssh://admin@switch") == ("ssh", "-o", "BatchMode=yes", "-p", "830", "-s", "--", "admin@switch", "netconf")
    assert "--" in ssh("ssh://-oProxyCommand=x:22")[: ssh("ssh://-oProxyCommand=x:22").index("netconf") - 1]


def test_a_driver_of_yours_is_found_by_its_path():
    made = device(FabricSection(driver=f"{__name__}:own", switch_url="tl1://switch", ports=8))

    assert made == ("tl1://switch", 8)


def own(section: FabricSection):
    return section.switch_url, section.ports


def test_a_driver_that_is_not_installed_is_named_at_the_start_with_what_installs_it():
    section = FabricSection(driver="rubato_nowhere.tl1:driver", switch_url="tl1://switch")

    with pytest.raises(ConfigError, match=r"fabric\.driver: rubato_nowhere.*pip install ./plugins/ocs"):
        FabricController.check_host(SimpleNamespace(fabric=section))
