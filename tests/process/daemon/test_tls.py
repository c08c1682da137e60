"""Operators of other hosts: who has no certificate of the CA, or no name in it that is allowed, is refused by name."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path

import grpc
import pytest
from kvdepot.client.ctl.calls import Operator
from kvdepot.client.ctl.remote import LOCAL_VERBS, Address, Remote
from kvdepot.core.control import Switch, SwitchCall
from kvdepot.core.errors import PermissionDenied
from kvdepot.core.report import GetStatusCall
from kvdepot.proto.methods import BY_CALL

from tests.rigs import ports
from tests.rigs.certificates import DAY, SERVER, Authority, Files
from tests.rigs.ctl_process import kvdepotctl, problems
from tests.rigs.daemon_process import DaemonProcess
from tests.rigs.operators import lines_of_log
from tests.rigs.patience import patient, wait_until
from tests.rigs.raw_client import status_of

ADMIN = "URI:spiffe://cluster/ops"
READER = "DNS:grafana.example"


class Node:
    """A daemon with a TLS address, and the files of its `[tls]`."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)
        self.files = self.authority.issue("server", *SERVER)
        self.admin = self.authority.issue("admin", ADMIN)
        self.reader = self.authority.issue("reader", READER.replace("grafana", "Grafana"))
        self.daemon = DaemonProcess(config=self.config([ADMIN], [READER]))

    def config(self, admins: list[str], readers: list[str]) -> str:
        return (
            '[daemon]\nlisten = ["unix:///overridden", "tcp://127.0.0.1:0", "tcp://localhost:0"]\n'
            f'[tls]\ncert = "{self.files.cert}"\nkey = "{self.files.key}"\nclient_ca = "{self.authority.pem}"\n'
            f"allow_admins = {json.dumps(admins)}\nallow_readers = {json.dumps(readers)}\n"
        )

    @property
    def port(self) -> int:
        return self.ports[0]

    @property
    def ports(self) -> list[int]:
        """Return the port of each address."""
        line = re.findall(r"with a certificate connect to (.*)", self.daemon.log)[-1]
        return [int(port) for port in re.findall(r"tcp://\S*?:(\d+)", line)]

    def remote(self, files: Files, ca: Path | None = None, server_name: str = "") -> Remote:
        address = Address("localhost", self.port)
        return Remote(address, ca or self.authority.pem, files.cert, files.key, server_name)

    def ctl(self, files: Files, *arguments: str, ca: Path | None = None) -> tuple[int, str]:
        """Return exit code and output of the real command."""
        options = [
            "--tls-ca",
            str(ca or self.authority.pem),
            "--tls-cert",
            str(files.cert),
            "--tls-key",
            str(files.key),
        ]
        done = kvdepotctl(f"tcp://localhost:{self.port}", *options, *arguments)
        return done.returncode, done.stdout + done.stderr


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    node = Node(tmp_path_factory.mktemp("tls"))
    with node.daemon:
        yield node


@pytest.mark.requirement("S3")
def test_an_admin_and_a_reader_have_the_roles_of_their_names(node: Node) -> None:
    code, said = node.ctl(node.admin, "status")
    assert code == 0 and said.startswith("HEALTH_")
    assert node.ctl(node.admin, "stores", "off")[0] == 0
    assert node.ctl(node.admin, "stores", "on")[0] == 0
    code, said = node.ctl(node.reader, "health", "-o", "json")
    assert code in (0, 1) and problems(said) == [], said
    code, said = node.ctl(node.reader, "stores", "off")
    assert code == 4 and f"the certificate of {READER} may only read" in said and "allow_admins" in said
    lines = [line for line in lines_of_log(node.daemon.log) if line["certificate"]]
    assert {(tuple(line["certificate"]), line["role"], line["outcome"]) for line in lines} == {
        ((ADMIN,), "admin", "ok"), ((READER,), "reader", "permission_denied"),
    }  # fmt: skip
    assert all(line["uid"] is None and line["address"].startswith("ipv4:127.0.0.1:") for line in lines)


ROGUES: dict[str, tuple[Callable[[Node, Authority], Files], int, str]] = {
    "another CA": (lambda _, other: other.issue("a", ADMIN), 3, "unable to get local issuer certificate"),
    "expired": (
        lambda node, _: node.authority.issue("b", ADMIN, life=(-3 * DAY, -DAY)), 3, "certificate has expired",
    ),
    "not yet valid": (
        lambda node, _: node.authority.issue("c", ADMIN, life=(DAY, 3 * DAY)), 3, "certificate is not yet valid",
    ),
    "self-signed": (lambda node, _: node.authority.issue("d", ADMIN, own=True), 3, "self-signed certificate"),
    "for servers only": (
        lambda node, _: node.authority.issue("e", ADMIN, client=False), 3, "unsuitable certificate purpose",
    ),
    "another name": (lambda node, _: node.authority.issue("f", "DNS:stranger"), 4, "of DNS:stranger is no operator"),
    "the name as another kind": (
        lambda node, _: node.authority.issue("g", f"URI:{READER}"), 4, f"of URI:{READER} is no operator",
    ),
    "a longer name": (
        lambda node, _: node.authority.issue("h", f"{ADMIN}/x", f"{READER}.evil"), 4, "is no operator",
    ),
    "the name, and more after a NUL": (
        lambda node, _: node.authority.issue("i", f"{ADMIN}\0.x", f"{READER}\0.x"), 4, "without a DNS or URI name",
    ),
    "only a common name": (
        lambda node, _: node.authority.issue("grafana.example"), 4, "a certificate without a DNS or URI name",
    ),
}  # fmt: skip


@pytest.mark.requirement("S3")
@pytest.mark.parametrize("rogue", ROGUES)
def test_a_certificate_that_is_not_allowed_is_refused_by_name(node: Node, tmp_path: Path, rogue: str) -> None:
    made, expected, text = ROGUES[rogue]
    code, said = node.ctl(made(node, Authority(tmp_path, "other")), "status")
    assert (code, text in said) == (expected, True), said


@pytest.mark.requirement("S3")
def test_nobody_without_a_certificate_is_answered(node: Node) -> None:
    method = BY_CALL[GetStatusCall]
    trust = grpc.ssl_channel_credentials(node.authority.pem.read_bytes())
    target = f"localhost:{node.port}"
    for channel in (grpc.insecure_channel(target), grpc.secure_channel(target, trust)):
        with channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(method.path, None, None)(b"", timeout=patient(30))
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    for service in ("/grpc.health.v1.Health/Check", "/kvdepot.v1.Depot/Locate"):
        with node.remote(node.admin).channel() as channel, pytest.raises(grpc.RpcError) as refused:
            channel.unary_unary(service, None, None)(b"", timeout=patient(30))
        assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED, service


@pytest.mark.requirement("S3")
def test_a_daemon_that_is_not_the_expected_one_gets_no_call(node: Node, tmp_path: Path) -> None:
    code, said = node.ctl(node.admin, "status", ca=Authority(tmp_path).pem)
    assert code == 3 and "is not accepted here" in said
    why = node.remote(node.admin, server_name="elsewhere").why_refused(patient(30))
    assert "is not accepted here" in why and "elsewhere" in why
    with ports.held() as nobody:
        port = ports.port_of(nobody)
        nowhere = Remote(Address("127.0.0.1", port), node.authority.pem, node.admin.cert, node.admin.key)
        why = nowhere.why_refused(patient(30))
    assert why == f"no daemon at tcp://127.0.0.1:{port} (Connection refused)"


@pytest.mark.requirement("S3")
def test_a_certificate_without_a_role_does_not_fill_the_audit_log(node: Node) -> None:
    with node.remote(node.authority.issue("j", "DNS:loud")).channel() as channel:
        for _ in range(50):
            with pytest.raises(PermissionDenied):
                Operator(channel, patient(30)).status()
    assert len([one for one in lines_of_log(node.daemon.log) if one["certificate"] == ["DNS:loud"]]) == 1


@pytest.mark.parametrize("verb", sorted(LOCAL_VERBS))
def test_verbs_of_the_daemon_s_own_host_say_so(node: Node, verb: str) -> None:
    code, said = node.ctl(node.admin, verb)
    assert code == 2 and "runs on the daemon's own host" in said


def test_an_address_without_certificates_in_the_command_is_wrong_usage(node: Node) -> None:
    done = kvdepotctl(f"tcp://localhost:{node.port}", "status")
    assert done.returncode == 2 and "needs --tls-ca, --tls-cert, --tls-key" in done.stderr


@pytest.mark.requirement("S3")
def test_a_reload_takes_a_right_away_from_an_open_connection(tmp_path: Path) -> None:
    node = Node(tmp_path)
    with node.daemon, node.remote(node.admin).channel() as channel:
        operator = Operator(channel, patient(30))
        off, on = (SwitchCall(Switch.STORES, on=on) for on in (False, True))
        operator.switch(off)
        operator.switch(on)
        (node.daemon.directory / "kvdepot.toml").write_text(node.config([], [ADMIN]))
        assert kvdepotctl(node.daemon, "reload").returncode == 0
        with pytest.raises(PermissionDenied, match="may only read"):
            operator.switch(off)
        assert operator.status().daemon_version


def test_a_certificate_in_its_last_week_is_a_problem_until_it_is_renewed(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.authority.issue("server", *SERVER, life=(-DAY, 3.52 * DAY))
    with node.daemon:
        code, said = node.ctl(node.reader, "health")
        assert "TLS_EXPIRES" in said and "expires in 3 d 12 h" in said, (code, said)
        assert status_of(node.daemon.socket).certificate_seconds_left == pytest.approx(3.52 * 86_400, abs=patient(60))
        node.authority.issue("server", *SERVER)
        wait_until(lambda: not problems(node.ctl(node.reader, "health", "-o", "json")[1]), "the new one is in use")


@pytest.mark.requirement("S3")
def test_certificates_are_replaced_without_a_restart_and_without_a_failed_call(tmp_path: Path) -> None:
    """The key comes after the certificate: files that do not fit together are not used."""
    node = Node(tmp_path)
    other = Authority.in_folder(tmp_path / "other", "other")
    former = node.authority.pem.read_bytes()
    theirs, new = other.issue("theirs", ADMIN), other.issue("server", *SERVER)
    with node.daemon:
        with node.remote(node.admin).channel() as open_one:
            operator = Operator(open_one, patient(30))
            assert operator.status().daemon_version
            shutil.copyfile(new.cert, node.files.cert)
            wait_until(lambda: operator.status() and "no pair of a certificate and its key" in node.daemon.log)
            with node.remote(node.admin).channel() as fresh:
                assert Operator(fresh, patient(30)).status().daemon_version, "the former ones are in use"
            shutil.copyfile(new.key, node.files.key)
            shutil.copyfile(other.pem, node.authority.pem)
            wait_until(lambda: operator.status() and "certificates replaced, for" in node.daemon.log)
        assert len(node.ports) == 2
        for port in node.ports:
            with Remote(Address("localhost", port), other.pem, theirs.cert, theirs.key).channel() as channel:
                assert Operator(channel, patient(30)).status().daemon_version, "each address has the new ones"
        code, said = node.ctl(theirs, "status")
        assert code == 0, said
        code, said = node.ctl(node.admin, "status")
        assert code == 3 and "unable to get local issuer certificate" in said
        (tmp_path / "both.pem").write_bytes(former + other.pem.read_bytes())
        code, said = node.ctl(node.admin, "status", ca=tmp_path / "both.pem")
        assert code == 3 and "the daemon's [tls] client_ca may be another one" in said


def test_a_daemon_does_not_start_with_files_that_it_cannot_use(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.files.key.chmod(0o644)
    with pytest.raises(AssertionError, match=r"tls\.key: .* no other user may read it"):
        node.daemon.start()
    node.daemon.kill()
    node.files.key.chmod(0o640)
    node.files = Files(node.admin.cert, node.files.key)
    node.daemon.config = node.config([ADMIN], [])
    with pytest.raises(AssertionError, match=r"tls\.cert: .* are no pair of a certificate and its key"):
        node.daemon.start()
    node.daemon.kill()


def test_a_server_certificate_that_has_expired_is_named(tmp_path: Path) -> None:
    node = Node(tmp_path)
    node.files = node.authority.issue("old", *SERVER, life=(-3 * DAY, timedelta(days=-1)))
    node.daemon.config = node.config([ADMIN], [])
    with node.daemon:
        code, said = node.ctl(node.admin, "status")
        assert code == 3 and "is not accepted here: certificate has expired" in said
