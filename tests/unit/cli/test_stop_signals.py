"""Signals that stop `infinity train`: who receives them, and what counts as a second one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time

import pytest

from infinity._src.cli import stop_signals
from infinity._src.cli.stop_signals import NUMBERS, Stopped, StopSignals, status_of


def send(number: int) -> None:
    os.kill(os.getpid(), number)


def test_what_is_ignored_stays_so_and_all_is_as_before_at_the_end() -> None:
    """nohup lets SIGHUP be ignored."""
    before = [signal.getsignal(number) for number in NUMBERS]
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals({}) as signals:
            signals.defer()
            send(signal.SIGHUP)
            assert signals.number == 0
            send(signal.SIGUSR1)
            assert signals.number == signal.SIGUSR1
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, hangup)
    assert [signal.getsignal(number) for number in NUMBERS] == before


def test_a_thread_that_gets_no_signals_takes_none() -> None:
    before = [signal.getsignal(number) for number in NUMBERS]
    found = []

    def entered() -> None:
        with StopSignals({}) as signals:
            found.append(signals.number)

    thread = threading.Thread(target=entered)
    thread.start()
    thread.join()
    assert found == [0]
    assert [signal.getsignal(number) for number in NUMBERS] == before


@pytest.mark.parametrize(
    ("launched", "after_s", "second"),
    [(False, 0.1, False), (False, 0.3, True), (True, 4.0, False), (True, 6.0, True)],
)
def test_what_comes_twice_within_moments_is_one_signal(
    launched: bool,
    after_s: float,
    second: bool,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    now = 100.0
    monkeypatch.setattr(stop_signals.time, "monotonic", lambda: now)
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals({"TORCHELASTIC_RUN_ID": "1"} if launched else {}) as signals:
        signals.defer()
        send(signal.SIGTERM)
        now += after_s
        if second:
            with pytest.raises(Stopped) as raised:
                send(signal.SIGTERM)
            assert status_of(raised.value) == 143
            # The third is the system's.
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        else:
            send(signal.SIGTERM)
        assert signals.number == signal.SIGTERM
    # torchrun sends it to ranks that end a moment later than the first.
    left = signal.signal(signal.SIGTERM, before)
    assert left == (signal.SIG_IGN if launched else before)
    assert capfd.readouterr().err.count("infinity: SIGTERM: stopping after") == 1


def test_a_signal_before_training_ends_it_at_once_or_where_training_begins() -> None:
    with StopSignals({}) as signals:
        with pytest.raises(Stopped, match="Ctrl-C"):
            send(signal.SIGINT)
        # Code that drops errors may have been running.
        with pytest.raises(Stopped, match="Ctrl-C"):
            signals.defer()
    assert status_of(KeyboardInterrupt()) == 130


@pytest.mark.parametrize("deferred", [False, True])
def test_a_signal_in_a_destructor_stops_the_command_all_the_same(deferred: bool) -> None:
    """Python drops what a destructor raises."""

    class Object:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)
            time.sleep(0)  # the handler runs before this

    before = sys.unraisablehook
    with pytest.raises(Stopped) as stopped, StopSignals() as signals:
        if deferred:
            signals.defer()
            signal.raise_signal(signal.SIGTERM)
            signals._first_s[signal.SIGTERM] -= stop_signals.LAUNCHED_TWICE_S
        one = Object()
        del one
        for _ in range(500):
            time.sleep(0.01)
    assert stopped.value.number == signals.number == signal.SIGTERM
    assert sys.unraisablehook is before
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
