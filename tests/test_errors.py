"""Errors of Presage: no message shows a password, in whatever address it came."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from presage.errors import OutputError, RegistryError, TraceError, why, without_passwords

SECRET = st.text("abcXYZ019-._~!$&()*+,;=:@", min_size=1).map(lambda text: f"geheim{text}")
SCHEME = st.sampled_from(["http", "https", "postgresql", "mysql+pymysql", "redis"])


@given(SCHEME, SECRET)
def test_no_error_shows_the_password_of_an_address(scheme: str, secret: str) -> None:
    told = f"opening: {scheme}://anna:{secret}@host:5000/db does not answer; start '{scheme}://{secret}@host'"
    for error in (RegistryError(told), OutputError(told), TraceError(told)):
        assert str(error) == f"opening: {scheme}://host:5000/db does not answer; start '{scheme}://host'"
    assert "geheim" not in why(OSError(told))


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("postgresql://h/db?user=a&password=geheim&ssl=on", "postgresql://h/db?user=a&password=***&ssl=on"),
        ("https://h/?access_token=geheim", "https://h/?access_token=***"),
        ("sqlite:////data/mlflow.db: no folder", "sqlite:////data/mlflow.db: no folder"),
        ("models:/next-agent@champion at http://h/a@b", "models:/next-agent@champion at http://h/a@b"),
        ("mail anna@host", "mail anna@host"),
    ],
)
def test_what_is_no_password_stays(told: str, shown: str) -> None:
    assert without_passwords(told) == shown
