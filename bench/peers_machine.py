"""An idle machine, and programs that run on it for a bounded time. Part of peers.py."""
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time

ATTEMPTS = 3  # at a measurement that others disturb
SECONDS = 240  # that a program may take


def fail(text):
    print(f"{os.path.basename(sys.argv[0])}: {text}", file=sys.stderr)
    sys.exit(1)


def say(text):
    print(text, file=sys.stderr, flush=True)


# --- programs --------------------------------------------------------------------------------------------------------

class Child:
    """A program that has been started: `end()` gives its output, the seconds from start to end, its peak memory."""

    def __init__(self, command, seconds=SECONDS):
        self.command = [str(word) for word in command]
        self.out, self.err = tempfile.TemporaryFile(), tempfile.TemporaryFile()
        self.started = time.perf_counter()
        self.process = subprocess.Popen(self.command, stdin=subprocess.DEVNULL, stdout=self.out, stderr=self.err)
        self.seconds = seconds
        self.timer = threading.Timer(seconds, self.process.kill)
        self.timer.daemon = True
        self.timer.start()

    def end(self, may_time_out=False):
        """The text is None for one that did not end in time, where it may do so."""
        _, status, usage = os.wait4(self.process.pid, 0)
        elapsed = time.perf_counter() - self.started
        timed_out = not self.timer.is_alive()
        self.timer.cancel()
        self.process.returncode = os.waitstatus_to_exitcode(status)
        if timed_out and may_time_out:
            return None, elapsed, 0
        if self.process.returncode != 0:
            why = f"took more than {self.seconds} s" if timed_out else f"failed: {self.text(self.err).strip()[-500:]}"
            fail(f"{' '.join(self.command)} {why}")
        unit = 1 if sys.platform == "darwin" else 1024
        return self.text(self.out), elapsed, usage.ru_maxrss * unit

    @staticmethod
    def text(file):
        file.seek(0)
        return file.read().decode(errors="replace")


def output_of(command):
    return Child(command).end()[0]


def json_of(command):
    """The last line of the program's output that is a JSON object."""
    return json.loads([line for line in output_of(command).splitlines() if line.startswith("{")][-1])


# --- an idle machine -------------------------------------------------------------------------------------------------

def processor_ticks():
    with open("/proc/stat") as stat:
        fields = [int(field) for field in stat.readline().split()[1:9]]
    return sum(fields), fields[3] + fields[4]  # all, idle


def process_ticks():
    ticks = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                text = stat.read()
        except OSError:
            continue  # it has ended
        name, rest = text[text.index("(") + 1:text.rindex(")")], text[text.rindex(")") + 2:].split()
        ticks[pid] = (name, int(rest[11]) + int(rest[12]))
    return ticks


def busy_share(seconds=0.5):
    """The share of all processors in use over `seconds`, and who used them most."""
    total, idle = processor_ticks()
    before = process_ticks()
    time.sleep(seconds)
    total_now, idle_now = processor_ticks()
    used = {}
    for pid, (name, ticks) in process_ticks().items():
        used[f"{name} ({pid})"] = ticks - before.get(pid, (name, ticks))[1]
    busiest = [name for name, ticks in sorted(used.items(), key=lambda item: -item[1])[:3] if ticks > 0]
    return 1 - (idle_now - idle) / max(total_now - total, 1), busiest


def wait_until_idle(args):
    until = time.monotonic() + args.wait
    told = False
    while True:
        share, busiest = busy_share()
        if share <= args.idle:
            return
        if time.monotonic() > until:
            fail(f"the machine is not idle ({share:.0%} in use, most by {', '.join(busiest)}); "
                 "figures taken now would be wrong. --wait SECONDS waits longer, --force measures all the same")
        if not told:
            say(f"waiting for an idle machine ({share:.0%} in use, most by {', '.join(busiest)})")
            told = True


def own_seconds():
    """Of processors, used by us and by our children that have ended."""
    return sum(used.ru_utime + used.ru_stime
               for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)))


def undisturbed(args, run):
    """What run() returns, from a try during which nobody else used the processors."""
    if args.force or not os.path.exists("/proc/stat"):
        return run()
    for _ in range(ATTEMPTS):
        wait_until_idle(args)
        total, idle = processor_ticks()
        own = own_seconds()
        result = run()
        total_now, idle_now = processor_ticks()
        own_ticks = (own_seconds() - own) * os.sysconf("SC_CLK_TCK")
        others = (total_now - total - (idle_now - idle) - own_ticks) / max(total_now - total, 1)
        if others <= args.idle:
            return result
        say(f"others used {others:.0%} of the processors meanwhile: once more")
    fail(f"the machine did not stay idle in {ATTEMPTS} tries; --force measures all the same")
