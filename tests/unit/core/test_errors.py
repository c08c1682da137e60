"""The closed set of errors says who is wrong, whether repeating helps, and what to do."""

from __future__ import annotations

import pytest
from kvdepot.core import errors
from kvdepot.core.errors import ERRORS, ConfigError, Fault, KvDepotError, LimitExceeded, ProtocolMismatch, Retry


def _subclasses(base: type[KvDepotError]) -> set[type[KvDepotError]]:
    direct = {sub for sub in base.__subclasses__() if sub.__module__ == errors.__name__}
    return direct.union(*(_subclasses(sub) for sub in direct)) if direct else set()


def test_the_set_of_errors_is_closed() -> None:
    assert set(ERRORS) == _subclasses(KvDepotError)
    assert len({error.code for error in ERRORS}) == len(ERRORS)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.code)
def test_every_error_has_code_fault_and_retry_of_its_own(error: type[KvDepotError]) -> None:
    assert error.code == error.code.lower() != KvDepotError.code
    assert "code" in vars(error)
    assert "fault" in vars(error)
    assert isinstance(error.fault, Fault)
    assert isinstance(error.retry, Retry)
    assert error.__doc__


def test_only_lost_registrations_ask_to_reattach() -> None:
    assert {error.code for error in ERRORS if error.retry is Retry.AFTER_REATTACH} == {
        "unknown_session",
        "unknown_namespace",
    }


def test_text_has_message_and_advice() -> None:
    assert str(errors.UnknownSession("session 00ff is unknown")).startswith("session 00ff is unknown; attach first")
    assert str(errors.NoRoom("full", advice="wait")) == "full; wait"
    assert str(errors.PlannerError("12 is odd")) == "12 is odd"


def test_limit_names_itself_and_its_numbers() -> None:
    error = LimitExceeded("keys of a Locate", 7, 5)
    assert (error.limit, error.value, error.maximum) == ("keys of a Locate", 7, 5)
    assert str(error).startswith("keys of a Locate: 7 is more than 5; ")


def test_config_error_names_file_key_and_reason() -> None:
    assert str(ConfigError("kvdepot.toml", "ram.capacity", "too small")) == "kvdepot.toml: ram.capacity: too small"
    assert str(ConfigError("kvdepot.toml", "", "is not TOML")) == "kvdepot.toml: is not TOML"


def test_protocol_mismatch_has_both_ranges() -> None:
    assert "protocols 2 to 3, the other side 1 to 1" in str(ProtocolMismatch((2, 3), (1, 1)))


def test_invalid_argument_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="no"):
        raise errors.InvalidArgument("no")
