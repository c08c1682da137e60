"""The names of a caller over TLS are the alternative names of its certificate, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvdepot.server.config.operators import Operators, Role, resolve
from kvdepot.server.rpc.callers import certificate_of

from tests.rigs.certificates import Authority


def context(**fields: list[bytes]) -> SimpleNamespace:
    return SimpleNamespace(auth_context=lambda: fields, peer=lambda: "ipv4:1.2.3.4:5")


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


@pytest.mark.requirement("S3")
@pytest.mark.parametrize(
    ("given", "names"),
    [
        ([], []),
        (["DNS:A.example", "URI:spiffe://X/y", "IP:1.2.3.4"], ["DNS:a.example", "URI:spiffe://X/y"]),
        (["URI:spiffe://ops\0.example", "DNS:a\0.b"], []),
        (["DNS:a b", "URI:x\n", "URI:ok"], ["URI:ok"]),
    ],
)
def test_names_are_whole_dns_and_uri_names_with_their_kind(
    authority: Authority, given: list[str], names: list[str]
) -> None:
    pem = authority.issue("ops", *given).cert.read_bytes()
    shown = {"peer_dns": [b"shown"], "x509_common_name": [b"ops"], "x509_subject_alternative_name": [b"shown"]}
    found = certificate_of(context(transport_security_type=[b"ssl"], x509_pem_cert=[pem], **shown))
    assert found is not None
    assert list(found.names) == names


@pytest.mark.requirement("S3")
def test_a_connection_without_a_checked_certificate_is_nobody(authority: Authority) -> None:
    pem = [authority.issue("ops", "DNS:a").cert.read_bytes()]
    assert certificate_of(context()) is None
    assert certificate_of(context(transport_security_type=[b"insecure"], x509_pem_cert=pem)) is None
    assert certificate_of(context(transport_security_type=[b"ssl"], peer_dns=[b"a"])) is None
    assert certificate_of(context(transport_security_type=[b"ssl"], x509_pem_cert=pem * 2)) is None
    broken = certificate_of(context(transport_security_type=[b"ssl"], x509_pem_cert=[b"none"]))
    assert broken is not None and broken.names == ()


@pytest.mark.requirement("S3")
def test_the_highest_role_of_a_name_counts() -> None:
    allowed = {Role.ADMIN: ["DNS:a"], Role.READER: ["DNS:a", "URI:b"]}
    nobody = resolve((), ())
    operators = Operators(nobody.users, nobody.groups, names=allowed)
    assert operators.role_of_names(["DNS:a", "URI:b"]) is Role.ADMIN
    assert operators.role_of_names(["URI:b", "DNS:c"]) is Role.READER
    assert operators.role_of_names(["URI:a", "DNS:b", "b", ""]) is None
    assert nobody.role_of_names(["DNS:a"]) is None
