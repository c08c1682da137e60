"""The names of a caller over TLS are the alternative names of its certificate, and nothing else."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from kvdepot.server.config.operators import Operators, Role, resolve
from kvdepot.server.rpc.callers import certificate_of


def context(**fields: list[bytes]) -> SimpleNamespace:
    return SimpleNamespace(auth_context=lambda: fields, peer=lambda: "ipv4:1.2.3.4:5")


CHECKED = {"transport_security_type": [b"ssl"], "x509_pem_cert": [b"pem"], "x509_common_name": [b"ops"]}


def names(**fields: list[bytes]) -> tuple[str, ...]:
    found = certificate_of(context(**CHECKED | fields))
    assert found is not None
    return found.names


@pytest.mark.requirement("S3")
def test_names_are_dns_and_uri_names_with_their_kind() -> None:
    assert names() == ()
    assert names(peer_dns=[b"A.example"], peer_uri=[b"spiffe://X/y"]) == ("DNS:a.example", "URI:spiffe://X/y")
    assert names(peer_email=[b"ops@x"], peer_ip=[b"1.2.3.4"], x509_subject_alternative_name=[b"ops"]) == ()
    assert names(peer_dns=[b"\xff"]) == ("DNS:\\xff",)


@pytest.mark.requirement("S3")
def test_a_connection_without_a_checked_certificate_is_nobody() -> None:
    assert certificate_of(context()) is None
    assert certificate_of(context(transport_security_type=[b"insecure"], peer_dns=[b"a"])) is None
    assert certificate_of(context(transport_security_type=[b"ssl"], peer_dns=[b"a"])) is None


@pytest.mark.requirement("S3")
def test_the_highest_role_of_a_name_counts() -> None:
    allowed = {Role.ADMIN: ["DNS:a"], Role.READER: ["DNS:a", "URI:b"]}
    operators = Operators(resolve((), ()).users, resolve((), ()).groups, names=allowed)
    assert operators.role_of_names(["DNS:a", "URI:b"]) is Role.ADMIN
    assert operators.role_of_names(["URI:b", "DNS:c"]) is Role.READER
    assert operators.role_of_names(["URI:a", "DNS:b", "b", ""]) is None
    assert resolve((), ()).role_of_names(["DNS:a"]) is None
