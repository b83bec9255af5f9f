"""The watch in processes of their own; it loads no torch, so they start at once."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from threading import Thread

import pytest

from mcore.signals import SignalWatch, install

ROOT = Path(__file__).parents[2]
SECONDS = 20.0

#: The main thread sleeps in C, as it would in a collective; `until` wakes it up by itself.
PRELUDE = """
    import os, signal, sys, time
    from mcore.signals import install
    watch = install()

    def until(condition):
        end = time.monotonic() + 15
        while not (met := condition()) and time.monotonic() < end:
            time.sleep(0.01)
        assert met

    print("ready", os.getpid(), flush=True)
"""


def ignore(*numbers):
    """Of the signals that a job in the background may have inherited, ignore just these."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number in numbers else signal.SIG_DFL)


@pytest.fixture
def start():
    """Start a program with the watch, and return it once it is ready."""
    started = []

    def start(body, ignored=()):
        process = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PRELUDE) + textwrap.dedent(body)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: ignore(*ignored),
        )
        started.append(process)
        assert process.stdout.readline().startswith("ready")
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def test_torch_is_not_loaded(start):
    process = start("print('torch' in sys.modules)")
    assert rest(process) == "False\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR2])
def test_a_signal_to_leave_is_noted_and_nothing_else_happens(start, number):
    process = start("until(lambda: watch.exit_signal); print(watch.exit_signal, watch.take_save())")
    process.send_signal(number)
    assert rest(process) == f"{int(number)} False\n"


def test_a_save_is_asked_for_once(start):
    process = start("until(watch.take_save); print(watch.exit_signal, watch.take_save())")
    process.send_signal(signal.SIGUSR1)
    assert rest(process) == "None False\n"


def test_the_save_signal_may_mean_to_leave(start):
    process = start("watch.let_save_signal_exit(); print('go', flush=True)\n"
                    "until(lambda: watch.exit_signal); print(watch.take_save())")  # fmt: skip
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGUSR1)
    assert rest(process) == "False\n"


def test_signals_at_once_are_one_and_a_later_one_leaves_whatever_the_main_thread_does(start):
    note = "until(lambda: watch.exit_signal); print('noted', flush=True); time.sleep(60)"
    process = start(f"import mcore.signals; mcore.signals._REPEAT_SECONDS = 60.0; {note}")
    for _ in range(3):
        process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "noted\n"
    time.sleep(1.2)
    process.send_signal(signal.SIGTERM)  # the launcher's copy, from a loaded machine
    time.sleep(0.3)
    assert process.poll() is None
    process = start(f"import mcore.signals; mcore.signals._REPEAT_SECONDS = 0.2; {note}")
    process.send_signal(signal.SIGTERM)
    assert process.stdout.readline() == "noted\n"
    time.sleep(0.3)
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == 128 + signal.SIGTERM
    assert "leaving at once" in process.stderr.read()


def test_with_the_handler_off_signals_kill_even_those_that_came_before(start):
    process = start("until(lambda: watch.exit_signal); watch.let_signals_kill(); time.sleep(60)")
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == -signal.SIGTERM
    process = start("watch.let_signals_kill(); print('go', flush=True); time.sleep(60)")
    assert process.stdout.readline() == "go\n"
    process.send_signal(signal.SIGINT)
    assert process.wait(SECONDS) == -signal.SIGINT


def test_ignored_signals_stay_ignored(start):
    process = start(
        "assert watch.exit_signal is None; time.sleep(1); print(watch.exit_signal)",
        ignored=[signal.SIGHUP],
    )
    process.send_signal(signal.SIGHUP)
    assert rest(process) == "None\n"


def test_a_worker_ends_with_its_launcher(start):
    worker = textwrap.dedent(PRELUDE) + "watch.follow_launcher(); time.sleep(60)"
    launcher = start(
        f"import subprocess; subprocess.Popen([sys.executable, '-c', {worker!r}]); time.sleep(60)"
    )
    worker_pid = int(launcher.stdout.readline().split()[1])
    launcher.kill()
    assert ended_within(worker_pid, SECONDS)


def watching(neighbours, grace=""):
    """A worker that says what it does, and lets the peers of these ranks and programs die."""
    workers = {rank: (process.pid, address) for rank, (process, address) in neighbours.items()}
    return f"""
    {grace}
    watch.watch_peers({{**{workers}, 3: (os.getpid(), "")}})
    watch.notice.write('in F0.2')
    print(watch.dead_peers(), flush=True); time.sleep(60)
    """


def neighbour(start, says):
    process = start(
        f"watch.notice.write({says!r}); print(watch.notice.address, flush=True); time.sleep(60)"
    )
    return process, process.stdout.readline().strip()


@pytest.mark.parametrize("told", [True, False], ids=["told", "alone"])
def test_a_worker_leaves_when_its_neighbour_has_died_and_says_what_both_did(start, told):
    dying = neighbour(start, "in B0.1")
    grace = "" if told else "import mcore.signals; mcore.signals._GRACE_SECONDS = 0.5"
    worker = start(watching({7: dying}, grace))
    assert worker.stdout.readline() == "[]\n"
    dying[0].kill()
    dying[0].wait()
    if told:  # as torchrun does
        worker.send_signal(signal.SIGTERM)
    assert worker.wait(SECONDS) == 1
    assert worker.stderr.read() == (
        f"error: rank 3: rank 7 (process {dying[0].pid}) has died in B0.1; "
        "leaving (this rank was in F0.2)\n"
    )


def test_the_one_who_died_first_is_named(start):
    """And not those that have left since, each for the same reason."""
    dying = neighbour(start, "")
    follower = start("watch.follow_peer(); print(watch.notice.address, flush=True); time.sleep(60)")
    follower = (follower, follower.stdout.readline().strip())
    worker = start(watching({0: follower, 7: dying, 8: (dying[0], "/nowhere")}))
    assert worker.stdout.readline() == "[]\n"
    for process, _ in (follower, dying):
        process.kill()
        process.wait()
    worker.send_signal(signal.SIGTERM)
    assert worker.wait(SECONDS) == 1
    died = f"(process {dying[0].pid}) has died"
    assert f"rank 3: rank 7 {died}; rank 8 {died}; leaving" in worker.stderr.read()


def test_one_who_lost_a_peer_otherwise_can_tell_who_is_at_fault(start):
    """A stopped process is as silent as a dead one; the ones that follow are not the cause."""
    stopped = neighbour(start, "in F0.1")
    follower = start("watch.follow_peer(); print(watch.notice.address, flush=True); time.sleep(60)")
    worker = start(f"""
    watch.watch_peers({{0: ({follower.pid}, {follower.stdout.readline().strip()!r}),
                        5: ({stopped[0].pid}, {stopped[1]!r})}})
    print(repr(watch.account_of_peers()), flush=True)
    print(watch.account_of_peers(seconds=10), flush=True)
    """)
    assert worker.stdout.readline() == "''\n"
    os.kill(stopped[0].pid, signal.SIGSTOP)
    assert rest(worker) == f"rank 5 (process {stopped[0].pid}) is stopped in F0.1\n"


def test_processes_of_another_launcher_are_no_neighbours(start):
    process = start("watch.watch_peers({1: (1, ''), 2: (os.getppid(), '')}); print(watch._peers)")
    assert rest(process) == "{}\n"


def test_at_the_end_the_thread_is_gone_and_signals_kill(start):
    process = start("watch.end(); print(watch._thread.is_alive(), flush=True); time.sleep(60)")
    assert process.stdout.readline() == "False\n"
    process.send_signal(signal.SIGTERM)
    assert process.wait(SECONDS) == -signal.SIGTERM


def test_a_watch_that_has_ended_leaves_nothing_open(start):
    """A program may train several times, one after the other."""
    process = start("""
        watch.end()
        del watch
        before = os.listdir("/proc/self/fd")
        for _ in range(3):
            install().end()
        print(len(os.listdir("/proc/self/fd")) - len(before))
    """)
    assert rest(process) == "0\n"


def test_there_is_one_watch(start):
    process = start("print(install() is watch)")
    assert rest(process) == "True\n"


def test_another_thread_installs_nothing():
    found = []
    thread = Thread(target=lambda: found.append(install()))
    thread.start()
    thread.join()
    assert found == [None]
    assert not isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), SignalWatch)


def rest(process):
    """What a process still prints before it ends well and without a word of error."""
    assert process.wait(SECONDS) == 0, process.stderr.read()
    assert process.stderr.read() == ""
    return process.stdout.read()


def ended_within(pid, seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False
