"""A lab by hand: ``python -m tests.lab up|down|list|ssh|run|sweep|image`` (see README.md)."""

from __future__ import annotations

import argparse
import os
import sys

from tests.lab import hosts, image
from tests.lab import lab as labs


def up(arguments: argparse.Namespace) -> None:
    """Bring a lab up and leave it running."""
    described = hosts.story() if arguments.story else hosts.default()
    lab = labs.Lab(arguments.name, described, labs.EXAMPLE_PVE_FILES, keep=True)
    lab.start()
    for host in lab.hosts:
        print(f"{host}\t{lab.address(host)}\t{lab.fingerprint(host)}")
    print(f"python -m tests.lab ssh {lab.name} HOST; python -m tests.lab down {lab.name}")


def down(arguments: argparse.Namespace) -> None:
    """Take a lab away."""
    labs.Lab.attach(arguments.name).stop()


def show(_: argparse.Namespace) -> None:
    """List the labs of this machine."""
    for about in labs.running():
        print(f"{about['name']}\t{labs.NETWORK}.{about['subnet']}.0/24\t{' '.join(about['hosts'])}")


def ssh(arguments: argparse.Namespace) -> None:
    """Log in to a host, or run a command on it."""
    command = labs.Lab.attach(arguments.name).ssh_command(arguments.host, arguments.user)
    os.execvp(command[0], [*command, *arguments.command])


def run(arguments: argparse.Namespace) -> None:
    """Run a shell command in a host without SSH."""
    done = labs.Lab.attach(arguments.name).run(arguments.host, " ".join(arguments.command))
    sys.stdout.write(done.stdout)
    sys.stderr.write(done.stderr)
    sys.exit(done.returncode)


def sweep(_: argparse.Namespace) -> None:
    """Take away the labs whose makers are dead."""
    for name in labs.sweep():
        print(name)


def build(_: argparse.Namespace) -> None:
    """Build the image, if it is not built yet."""
    print(image.get().host)


def main() -> None:
    """Do what the command line says."""
    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    commands = parser.add_subparsers(required=True)

    one = commands.add_parser("up", help=up.__doc__)
    one.add_argument("name", nargs="?")
    one.add_argument("--story", action="store_true", help="kpro5 without a driver, as the story begins")
    one.set_defaults(do=up)
    one = commands.add_parser("down", help=down.__doc__)
    one.add_argument("name")
    one.set_defaults(do=down)
    one = commands.add_parser("list", help=show.__doc__)
    one.set_defaults(do=show)
    one = commands.add_parser("ssh", help=ssh.__doc__)
    one.add_argument("--user", default="root")
    one.add_argument("name")
    one.add_argument("host")
    one.add_argument("command", nargs=argparse.REMAINDER)
    one.set_defaults(do=ssh)
    one = commands.add_parser("run", help=run.__doc__)
    one.add_argument("name")
    one.add_argument("host")
    one.add_argument("command", nargs=argparse.REMAINDER)
    one.set_defaults(do=run)
    one = commands.add_parser("sweep", help=sweep.__doc__)
    one.set_defaults(do=sweep)
    one = commands.add_parser("image", help=build.__doc__)
    one.set_defaults(do=build)

    arguments = parser.parse_args()
    if reason := labs.missing():
        sys.exit(reason)
    arguments.do(arguments)


if __name__ == "__main__":
    main()
