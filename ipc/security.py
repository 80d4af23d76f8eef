"""Encryption and mutual authentication with CURVE (ZeroMQ RFC 26), for addresses other than loopback.

An engine has a key pair and a folder ``authorized_keys`` with one public key a file; a client has a key
pair and knows the engine's public key. Every file is readable by its user only, or it is refused. Keys
are read once, when the process starts.

A socket with CURVE but without a ZAP handler lets every client in that knows the server's key, and one with
a handler that has died does too; so `ZAP_ENFORCE_DOMAIN` is always set, which closes both holes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from ipc.endpoints import private_dir

DOMAIN = "decodeck"
_KEY = re.compile(rb"[!-~]{40}")


class KeyFileError(ValueError):
    """A key file that cannot be trusted or read, and what to do about it."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """Both keys in Z85, 40 bytes each."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:  # a secret must not reach a log
        return f"KeyPair({fingerprint(self.public)})"


def fingerprint(public: bytes) -> str:
    """What two people compare to know that they mean the same key."""
    return hashlib.sha256(public).hexdigest()[:16]


def key_pair(directory: Path, name: str) -> KeyPair:
    """The pair in ``directory/name.key``, made if there is none. Raises `KeyFileError`, `EndpointError`."""
    path = private_dir(directory) / f"{name}.key"
    if not path.exists():
        public, secret = zmq.curve_keypair()
        with contextlib.suppress(FileExistsError):  # another process was faster: its pair counts
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(public + b"\n" + secret + b"\n")
    public, secret = _read_keys(path, 2)
    if zmq.curve_public(secret) != public:
        raise KeyFileError(f"{path}: its two keys do not belong together; remove it to have a new pair made")
    return KeyPair(public, secret)


def authorize(directory: Path, name: str, public: bytes) -> None:
    """Let the client with this public key in. Raises `KeyFileError` for something that is no key."""
    if not _KEY.fullmatch(public):
        raise KeyFileError(f"{name}: a public key has 40 printable characters, this has {len(public)}")
    folder = private_dir(private_dir(directory) / "authorized_keys")
    fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(public + b"\n")


def authorized(directory: Path) -> frozenset[bytes]:
    """The public keys in ``directory/authorized_keys``. Raises `KeyFileError` if one cannot be trusted."""
    folder = directory / "authorized_keys"
    if not folder.is_dir():
        return frozenset()
    return frozenset(_read_keys(path, 1)[0] for path in sorted(private_dir(folder).iterdir()))


def _read_keys(path: Path, count: int) -> list[bytes]:
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(fd, "rb") as file:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode) or (os.name == "posix" and mode & 0o077):
            raise KeyFileError(f"{path} is open to other users; run: chmod 600 '{path}'")
        lines = file.read(4096).split()
    if len(lines) != count or not all(_KEY.fullmatch(line) for line in lines):
        raise KeyFileError(f"{path} does not hold {count} keys of 40 characters")
    return lines


class _Allowed:
    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def callback(self, domain: str, key: bytes) -> bool:
        return domain == DOMAIN and key in self._keys


class Guard:
    """Decides who may connect to the CURVE sockets of one context. `close` it before the context."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: KeyPair, allowed: frozenset[bytes]
    ) -> None:
        self._keys = keys
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=DOMAIN, credentials_provider=_Allowed(allowed))

    def protect(self, socket: zmq.Socket[bytes]) -> None:
        """Make a socket that is not bound yet accept the allowed clients only."""
        socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN.encode())
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        socket.setsockopt(zmq.CURVE_SERVER, 1)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)

    def close(self) -> None:
        """Stop deciding: from now on nobody is let in."""
        self._authenticator.stop()


def protect_client(socket: zmq.Socket[bytes], keys: KeyPair, server_public: bytes) -> None:
    """Make a socket that is not connected yet speak to the holder of ``server_public`` only."""
    socket.setsockopt(zmq.CURVE_SERVERKEY, server_public)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
