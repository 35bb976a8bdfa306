"""S3 servers on this machine alone: moto, which is a mock, and Ceph, which is real.

Ceph (a monitor, a disk in memory and a gateway) needs root and the Debian packages ``radosgw``,
``ceph-mon`` and ``ceph-osd``. As a program, this runs Ceph until Ctrl-C, and says how to reach it:
``python tests/shared/s3_servers.py``.
"""

import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from urllib.request import Request, urlopen

from obstore import sign
from obstore.store import S3Store

from dist_checkpointing import ObjectPath, ObjectStoreOptions

ACCESS_KEY, SECRET_KEY, BUCKET = "testing", "testingtesting", "checkpoints"
PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw", "ceph", "ceph-authtool", "monmaptool")
SECONDS = 90

_CONFIG = """\
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}/0
ms bind msgr1 = false
public addr = 127.0.0.1
cluster addr = 127.0.0.1
auth cluster required = cephx
auth service required = cephx
auth client required = cephx
auth allow insecure global id reclaim = false
keyring = {root}/keyring
run dir = {root}
admin socket =
log file =
pid file =
crash dir = {root}
mon data = {root}/mon
mon cluster log file =
mon allow pool size one = true
mon warn on pool no redundancy = false
osd data = {root}/osd
osd objectstore = memstore
memstore device bytes = {memory}
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
osd crush chooseleaf type = 0
osd max object name len = 2048
rgw max chunk size = 4194304
rgw dynamic resharding = false
rgw enable usage log = false
rgw gc obj min wait = 1
rgw gc processor period = 5
rgw gc processor max time = 5
rgw thread pool size = 64
"""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs.

    Attributes:
        endpoint: its URL.
    """

    endpoint: str

    def place(self, endpoint: str | None = None) -> ObjectPath:
        """A place that no other test uses, reached through ``endpoint``, such as a proxy."""
        options = ObjectStoreOptions(
            endpoint=endpoint or self.endpoint,
            region="us-east-1",
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            max_retries=2,
            retry_timeout=10.0,
        )
        return ObjectPath.of(f"s3://{BUCKET}/{uuid.uuid4().hex}/1000", options)

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients find it."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ALLOW_HTTP": "true",
        }


@contextmanager
def moto_server() -> Iterator[Server]:
    """Run moto with one bucket."""
    # Late: it takes a second, and whoever starts Ceph needs none.
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    _make_bucket(f"http://{host}:{port}")
    try:
        yield Server(f"http://{host}:{port}")
    finally:
        moto.stop()


def missing() -> str | None:
    """Why there can be no server here; None if there can."""
    absent = [program for program in PROGRAMS if shutil.which(program) is None]
    if absent:
        packages = "apt-get install --no-install-recommends radosgw ceph-mon ceph-osd"
        return f"no {', '.join(absent)}: {packages}"
    return None if os.geteuid() == 0 else "Ceph is started as root only"


@contextmanager
def ceph_server(memory: int = 6 << 30) -> Iterator[Server]:
    """Run a server with one bucket; everything of it is gone at the end.

    Args:
        memory: bytes that it keeps at most.
    """
    root = Path(tempfile.mkdtemp(prefix="ceph-"))
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        yield _started(root, memory, daemons)
    finally:
        for daemon in reversed(daemons):
            daemon.kill()  # nothing of it is kept
            daemon.wait()
        shutil.rmtree(root)


def _started(root: Path, memory: int, daemons: list[subprocess.Popen[bytes]]) -> Server:
    fsid, osd, mon_port, port = uuid.uuid4(), uuid.uuid4(), free_port(), free_port()
    config = _CONFIG.format(root=root, fsid=fsid, mon_port=mon_port, memory=memory)
    (root / "ceph.conf").write_text(config)
    (root / "mon").mkdir()
    (root / "osd").mkdir()
    environment = {**os.environ, "CEPH_CONF": str(root / "ceph.conf")}

    def run(command: str) -> str:
        done = subprocess.run(
            shlex.split(command),
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command}: {done.stderr.strip()[-2000:]}")
        return done.stdout

    def daemon(command: str) -> Callable[[], bool]:
        log = (root / f"{command.split(maxsplit=1)[0]}.log").open("wb")
        words = [*shlex.split(command), "--setuser", "root", "--setgroup", "root"]
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
        log.close()
        daemons.append(process)
        return lambda: process.poll() is None

    admin = "--cap mon 'allow *' --cap osd 'allow *' --cap mgr 'allow *'"
    keyring, monmap = root / "keyring", root / "monmap"
    run(f"monmaptool --create --fsid {fsid} --addv a [v2:127.0.0.1:{mon_port}/0] {monmap}")
    run(f"ceph-authtool -C {keyring} --gen-key -n mon. --cap mon 'allow *'")
    run(f"ceph-authtool {keyring} --gen-key -n client.admin {admin}")
    run(f"ceph-mon --mkfs -i a --monmap {monmap} --keyring {keyring}")
    daemon("ceph-mon -f -i a")
    run(f"ceph osd new {osd}")
    key = run("ceph auth get-or-create osd.0 mon 'allow profile osd' osd 'allow *'")
    with keyring.open("a") as file:
        file.write(key)
    run(f"ceph-osd -i 0 --mkfs --osd-uuid {osd}")
    lives = daemon("ceph-osd -f -i 0")
    _wait(lambda: "1 up" in run("ceph osd stat"), lives, root)
    endpoint = f"127.0.0.1:{port}"
    # Without tcp_nodelay each answer with a body comes 40 ms late.
    lives = daemon(
        f"radosgw -f -n client.admin --keyring {keyring} "
        f"--rgw-frontends 'beast endpoint={endpoint} tcp_nodelay=1'"
    )
    _wait(lambda: _answers(port), lives, root)
    run(
        "radosgw-admin user create --uid=ckpt --display-name=ckpt "
        f"--access-key={ACCESS_KEY} --secret={SECRET_KEY}"
    )
    _make_bucket(f"http://{endpoint}")
    return Server(f"http://{endpoint}")


def _make_bucket(endpoint: str) -> None:
    """obstore makes none, but signs the request."""
    store = S3Store(
        BUCKET,
        endpoint=endpoint,
        region="us-east-1",
        access_key_id=ACCESS_KEY,
        secret_access_key=SECRET_KEY,
        client_options={"allow_http": True},
    )
    url = sign(store, "PUT", "", expires_in=timedelta(minutes=5))
    urlopen(Request(url, method="PUT", data=b"")).close()


def _wait(is_ready: Callable[[], bool], lives: Callable[[], bool], root: Path) -> None:
    deadline = time.monotonic() + SECONDS
    while not is_ready():
        if not lives() or time.monotonic() > deadline:
            logs = "\n".join(path.read_text()[-2000:] for path in root.glob("*.log"))
            raise RuntimeError(f"Ceph does not start:\n{logs}")
        time.sleep(0.2)


def free_port() -> int:
    """A port that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _answers(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def main() -> None:
    reason = missing()
    if reason is not None:
        sys.exit(reason)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with ceph_server() as server:
        lines = [f"export {name}={value}" for name, value in server.environment.items()]
        lines.append(f"# a bucket: s3://{BUCKET}    Ctrl-C ends the server")
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        with suppress(KeyboardInterrupt):
            time.sleep(1e6)


if __name__ == "__main__":
    main()
