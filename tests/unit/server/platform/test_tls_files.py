"""The files of a TLS listener are used as a whole, or not."""

from __future__ import annotations

import codecs
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from kvdepot.server.platform.tls_files import TlsFileError, TlsFiles

from tests.rigs.certificates import DAY, SERVER, Authority


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


def files_of(authority: Authority, name: str = "server") -> tuple[TlsFiles, Path, Path]:
    files = authority.issue(name, *SERVER)
    return TlsFiles(files.cert, files.key, authority.pem), files.cert, files.key


def test_what_is_loaded_is_what_the_files_have_and_a_change_is_seen_once(authority: Authority) -> None:
    files, cert, key = files_of(authority)
    pem = files.load()
    assert (pem.cert, pem.key, pem.client_ca) == (cert.read_bytes(), key.read_bytes(), authority.pem.read_bytes())
    assert files.load_changed() is None
    other = authority.issue("other", *SERVER)
    shutil.copyfile(other.cert, cert)
    for _ in range(2):
        with pytest.raises(TlsFileError, match="are no pair of a certificate and its key"):
            files.load_changed()
    shutil.copyfile(other.key, key)
    changed = files.load_changed()
    assert changed is not None and changed.cert == other.cert.read_bytes()
    assert files.load_changed() is None


def test_a_link_that_moves_is_a_change(authority: Authority, tmp_path: Path) -> None:
    """That is how Kubernetes replaces a secret."""
    for name in ("a", "b"):
        issued = authority.issue("server", *SERVER)
        (tmp_path / name).mkdir()
        issued.cert.rename(tmp_path / name / "tls.crt")
        issued.key.rename(tmp_path / name / "tls.key")
    (tmp_path / "now").symlink_to("a")
    files = TlsFiles(tmp_path / "now/tls.crt", tmp_path / "now/tls.key", authority.pem)
    files.load()
    (tmp_path / "then").symlink_to("b")
    (tmp_path / "then").rename(tmp_path / "now")
    changed = files.load_changed()
    assert changed is not None and changed.cert == (tmp_path / "b/tls.crt").read_bytes()


@pytest.mark.requirement("S3")
def test_the_mark_of_utf_8_is_no_part_of_what_is_loaded(authority: Authority) -> None:
    """gRPC would stay with the former CA, which somebody has taken away, and the log would name the new one."""
    files, *paths = files_of(authority)
    before = files.load()
    for path in (*paths, authority.pem):
        path.write_bytes(codecs.BOM_UTF8 + path.read_bytes())
    assert files.load_changed() == before


@pytest.mark.parametrize(
    ("mode", "works"), [(0o600, True), (0o400, True), (0o440, True), (0o640, True), (0o644, False), (0o660, False)]
)
def test_a_key_that_others_can_read_or_its_group_can_change_is_not_used(
    authority: Authority, mode: int, works: bool
) -> None:
    files, _, key = files_of(authority)
    key.chmod(mode)
    if works:
        assert files.load()
    else:
        with pytest.raises(TlsFileError, match=rf"tls\.key: .* its mode is {mode:04o}"):
            files.load()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a file to another user")
def test_a_key_of_another_user_is_not_used(authority: Authority) -> None:
    files, _, key = files_of(authority)
    os.chown(key, 61001, 61001)
    with pytest.raises(TlsFileError, match=r"tls\.key: .* it is of uid 61001"):
        files.load()


@pytest.mark.parametrize(
    ("make", "works"),
    [(ed25519.Ed25519PrivateKey.generate, False), (partial(ec.generate_private_key, ec.SECP384R1()), True),
     (partial(ec.generate_private_key, ec.SECP521R1()), False), (partial(rsa.generate_private_key, 65537, 2048), True)],
)  # fmt: skip
def test_a_key_that_grpc_cannot_use_is_refused(authority: Authority, make: Callable[[], Any], works: bool) -> None:
    issued = authority.issue("server", *SERVER, make_key=make)
    files = TlsFiles(issued.cert, issued.key, authority.pem)
    if works:
        assert files.load()
    else:
        with pytest.raises(TlsFileError, match=r"tls\.cert: .* has a key that gRPC cannot use"):
            files.load()


@pytest.mark.skipif(not shutil.which("openssl"), reason="nothing else makes such keys")
@pytest.mark.parametrize(
    "kind",
    [
        "ec -pkeyopt ec_paramgen_curve:prime256v1 -pkeyopt ec_param_enc:explicit",
        "ec -pkeyopt ec_paramgen_curve:sect571r1",
        "rsa-pss",
    ],
)
def test_a_key_that_openssl_takes_and_grpc_does_not_is_refused(tmp_path: Path, kind: str) -> None:
    """The process that sends to peers ended when it met the second one, and so did each that followed it."""
    cert, key = tmp_path / "a.pem", tmp_path / "a.key"
    command = f"openssl req -x509 -nodes -subj /CN=a -keyout {key} -out {cert} -newkey {kind}"
    subprocess.run(command.split(), check=True, capture_output=True)
    key.chmod(0o600)
    with pytest.raises(TlsFileError, match=r"tls\.cert: .* has a key that gRPC cannot use"):
        TlsFiles(cert, key, cert).load()


@pytest.mark.requirement("S3")
@pytest.mark.parametrize("life", [(-3 * DAY, -DAY), (DAY, 3 * DAY)])
def test_a_certificate_that_is_not_valid_now_replaces_none_that_is(
    authority: Authority, monkeypatch: pytest.MonkeyPatch, life: tuple[timedelta, timedelta]
) -> None:
    files, cert, key = files_of(authority)
    files.load()
    other = authority.issue("other", *SERVER, life=life)
    shutil.copyfile(other.cert, cert)
    shutil.copyfile(other.key, key)
    for _ in range(2):
        with pytest.raises(TlsFileError, match="is not valid now, and the certificate in use is"):
            files.load_changed()
    monkeypatch.setattr(time, "time", lambda clock=time.time: clock() + (40 * DAY).total_seconds())
    changed = files.load_changed()
    assert changed is not None and changed.cert == other.cert.read_bytes(), "neither is: the clock may be wrong"


def test_files_that_are_none_are_named_and_nothing_of_them_is_repeated(authority: Authority, tmp_path: Path) -> None:
    files, cert, key = files_of(authority)
    text = key.read_text()
    for path, name in ((authority.pem, "client_ca"), (cert, "cert"), (key, "cert")):
        kept = path.read_bytes()
        path.write_text("-----BEGIN PRIVATE KEY-----\nsecret\n")
        with pytest.raises(TlsFileError, match=rf"tls\.{name}: ") as refused:
            files.load()
        assert "secret" not in str(refused.value)
        path.write_bytes(kept)
        moved = path.rename(tmp_path / "away")
        with pytest.raises(TlsFileError, match="No such file or directory"):
            files.load()
        moved.rename(path)
    key.write_text(f"{text}{'x' * (1 << 20)}")
    with pytest.raises(TlsFileError, match=r"tls\.key: .* expected at most"):
        files.load()
