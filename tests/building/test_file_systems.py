"""Where a data set cannot be built, as far as a list of mounts tells."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import memload
from memload.building import file_systems
from memload.building.file_systems import check_file_system

#: How each program appears, as its documentation or its users show it.
S3FS = "fuse.s3fs s3fs rw,user_id=0,group_id=0,allow_other"
MOUNTPOINT = "fuse mountpoint-s3 rw,user_id=0,group_id=0,default_permissions"
GCSFUSE = "fuse.gcsfuse my-bucket rw,user_id=1000,group_id=1001,default_permissions"
BLOBFUSE2 = "fuse blobfuse2 rw,user_id=0,group_id=0,allow_other"
RCLONE = "fuse.rclone remote:bucket rw,user_id=1000,group_id=1000"
GOOFYS = "fuse.goofys bucket rw,user_id=0,group_id=0,default_permissions"

NFS = "nfs server:/export rw,vers=3,hard,proto=tcp,timeo=600,local_lock=none,addr=10.0.0.1"
NFS4 = "nfs4 server:/export rw,vers=4.2,hard,proto=tcp,local_lock=none,addr=10.0.0.1"
LUSTRE = "lustre 10.0.0.1@tcp:/fs rw,checksum,flock,nouser_xattr,lruresize,lazystatfs"
SHARED = [
    NFS,
    NFS4,
    NFS.replace("local_lock=none", "local_lock=flock"),
    LUSTRE,
    "ceph 10.0.0.1:6789:/ rw,name=admin,secret=<hidden>,acl",
    "fuse.ceph-fuse ceph-fuse rw,user_id=0,group_id=0",
    "fuse.juicefs JuiceFS:data rw,user_id=0,group_id=0,allow_other",
    "fuse.glusterfs server:/volume rw,user_id=0,group_id=0",
    "gpfs gpfs0 rw,relatime",
    "cifs //server/share rw,vers=3.0",
    "ext4 /dev/sda1 rw",
    "fuse /dev/fuse rw",
]


@pytest.fixture
def mount(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """A function that lets a folder appear as a mount, and returns it."""
    listed = tmp_path / "mountinfo"
    monkeypatch.setattr(file_systems, "MOUNTS", listed)
    lines = ["22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw"]

    def call(file_system: str, name: str = "shared", options: str = "rw,relatime") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        point = str(folder).replace(" ", "\\040")
        lines.append(f"36 22 0:{len(lines)} / {point} {options} shared:9 master:2 - {file_system}")
        listed.write_text("\n".join(lines) + "\n")
        return folder

    return call


@pytest.mark.parametrize(
    ("file_system", "name"),
    [
        (S3FS, "s3fs"),
        (MOUNTPOINT, "Mountpoint for Amazon S3"),
        ("fuse.mountpoint-s3 mountpoint-s3 rw", "Mountpoint for Amazon S3"),
        (GCSFUSE, "gcsfuse"),
        (BLOBFUSE2, "blobfuse2"),
        (RCLONE, "rclone mount"),
        (GOOFYS, "goofys"),
    ],
)
def test_object_storage_is_refused_for_parts(
    file_system: str, name: str, mount: Callable[..., Path]
) -> None:
    folder = mount(file_system)
    below = folder / "data" / "set"
    below.mkdir(parents=True)
    for path in (folder, below):
        with pytest.raises(memload.BuildError, match=name) as raised:
            check_file_system(path, in_parts=True)
        assert f"mounted at {folder})" in str(raised.value)
        assert str(raised.value).endswith("then copy the files there.")
    check_file_system(folder.parent, in_parts=True)


@pytest.mark.parametrize("file_system", [MOUNTPOINT, GOOFYS])
def test_object_storage_without_random_writes_is_refused_for_all_builds(
    file_system: str, mount: Callable[..., Path], folder: Path
) -> None:
    output = mount(file_system) / "out.bin"
    for options in ({}, {"part": (0, 2)}):
        with pytest.raises(memload.BuildError, match="is object storage"):
            memload.build(folder, output, size=8, num_workers=0, **options)
    assert not list(output.parent.iterdir())


@pytest.mark.parametrize("file_system", [S3FS, GCSFUSE, BLOBFUSE2, RCLONE])
def test_object_storage_that_is_only_slow_may_hold_a_build_by_itself(
    file_system: str, mount: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    check_file_system(mount(file_system), in_parts=False)
    assert "then copy the files there: that is much faster" in caplog.text


@pytest.mark.parametrize("file_system", SHARED)
@pytest.mark.parametrize("in_parts", [False, True])
def test_disks_and_shared_file_systems_are_fine(
    file_system: str, in_parts: bool, mount: Callable[..., Path], caplog: Any
) -> None:
    check_file_system(mount(file_system), in_parts=in_parts)
    assert not caplog.records


@pytest.mark.parametrize(
    ("file_system", "remedy"),
    [
        (NFS.replace("hard", "hard,nolock"), "Mount it with -o lock in place of nolock"),
        (NFS.replace("=none", "=all"), "-o local_lock=none in place of local_lock=all"),
        (NFS4.replace("=none", "=posix"), "-o local_lock=none in place of local_lock=posix"),
        (LUSTRE.replace("flock", "localflock"), "Mount it with -o flock in place of localflock"),
        ("cifs //server/share rw,vers=3.0,nobrl", "Mount it with -o brl in place of nobrl"),
        ("gfs2 /dev/vg/lv rw,localflocks", "with -o nolocalflocks in place of localflocks"),
        ("fuse.sshfs user@host:/data rw,user_id=0", "in place of sshfs"),
    ],
)
def test_locks_that_other_machines_do_not_see_are_a_warning_for_parts(
    file_system: str, remedy: str, mount: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = mount(file_system)
    check_file_system(folder, in_parts=False)
    assert not caplog.records
    check_file_system(folder, in_parts=True)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert "other machines do not see the locks" in record.message
    assert remedy in record.message


def test_the_innermost_and_latest_mount_counts(
    mount: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    bucket = mount(S3FS, "a bucket, with spaces")
    disk = mount("ext4 /dev/sdb1 rw", "a bucket, with spaces/disk")
    check_file_system(disk, in_parts=True)
    with pytest.raises(memload.BuildError):
        check_file_system(bucket, in_parts=True)
    mount("ext4 /dev/sdc1 rw", bucket.name)  # over the other mount
    check_file_system(bucket, in_parts=True)
    similar = bucket.with_name(bucket.name + " too")
    similar.mkdir()
    check_file_system(similar, in_parts=True)
    assert not caplog.records


def test_a_link_into_a_mount_is_in_the_mount(mount: Callable[..., Path], tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(mount(S3FS))
    with pytest.raises(memload.BuildError):
        check_file_system(link, in_parts=True)


def test_without_a_list_of_mounts_nothing_is_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_systems, "MOUNTS", tmp_path / "missing")
    check_file_system(tmp_path, in_parts=True)


def test_lines_of_another_form_are_passed_over(
    tmp_path: Path, mount: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bucket = mount(S3FS, "line\u2028break\x0bs")
    for line in ("", "odd", "1 2 3 - ext4", f"1 2 0:3 / {tmp_path} rw - ext4"):
        with file_systems.MOUNTS.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")
    with pytest.raises(memload.BuildError):
        check_file_system(bucket, in_parts=True)
    check_file_system(tmp_path, in_parts=True)


def test_the_mounts_of_this_machine_can_be_read(tmp_path: Path) -> None:
    check_file_system(tmp_path, in_parts=True)
