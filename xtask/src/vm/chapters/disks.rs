//! Full, read-only and slow disks under a server, on ext4, xfs, btrfs and tmpfs. Leaves nothing.
//!
//! Each file system has a server of its own, without a node, beside the cluster. A server on a bad disk
//! answers reads, refuses writes with words that name the cause, and recovers when the disk does.

use crate::sh::Outcome;
use crate::vm::story::Story;

/// Functions for the scripts below. `serve` starts the server and waits until it answers.
const WORDS: &str = r#"
export KUBECONFIG=/mnt/try/data/kubeconfig
k() { timeout 60 decapod kubectl "$@"; }
fail() { echo "$*" >&2; journalctl -u try --no-pager -o cat -n 20 | grep -v 'slow request' >&2; exit 1; }
soon() { local end=$((SECONDS + LIMIT)); until "$@" >/tmp/soon 2>&1; do
  [[ $SECONDS -lt $end ]] || fail "not soon: $*: $(tail -n 3 /tmp/soon)"; sleep .3; done; }
launch() { systemctl reset-failed try 2>/dev/null || true
  systemd-run --quiet --unit=try decapod server --disable-agent --https-listen-port 7443 --data-dir /mnt/try/data; }
serve() { launch; soon k get configmap -n kube-system; }
stop() { systemctl stop try 2>/dev/null || true; }
kill9() { systemctl kill -s KILL try; soon ended; systemctl reset-failed try 2>/dev/null || true; }
ended() { ! systemctl is-active --quiet try; }
write() { echo "{\"apiVersion\":\"v1\",\"kind\":\"ConfigMap\",\"metadata\":{\"name\":\"$1\"},\"data\":{\"a\":\"$(head -c 60000 /dev/zero | tr '\0' x)\"}}" | k apply -f -; }
exists() { k get configmap "$1"; }
make() { clear; mkdir -p /mnt/try; case $1 in
  tmpfs) mount -t tmpfs -o size=${2:-96M},nr_inodes=${3:-0} try /mnt/try;;
  *) truncate -s 400M /var/try.img
     losetup /dev/loop7 /var/try.img
     echo "0 $(blockdev --getsz /dev/loop7) linear /dev/loop7 0" | dmsetup create try
     case $1 in ext4) mkfs.ext4 -q -N ${3:-20000} /dev/mapper/try;; *) mkfs.$1 -q -f /dev/mapper/try;; esac
     mount -t $1 /dev/mapper/try /mnt/try;;
  esac; }
clear() { stop; umount -l /mnt/try 2>/dev/null || true; udevadm settle; for i in 1 2 3 4 5; do dmsetup remove --retry try 2>/dev/null && break; [[ -e /dev/mapper/try ]] || break; sleep .5; done
  losetup -d /dev/loop7 2>/dev/null || true; rm -f /var/try.img; }
fill() { dd if=/dev/zero of=/mnt/try/fill bs=64k 2>/dev/null || true; dd if=/dev/zero of=/mnt/try/fill2 bs=1 count=60000 2>/dev/null || true; sync -f /mnt/try; }
"#;

const SYSTEMS: [&str; 4] = ["ext4", "xfs", "btrfs", "tmpfs"];

fn on_each(story: &mut Story, systems: &[&str], script: &str) -> Outcome {
    let limit = story.machine.limit(45).as_secs();
    let mut failed = Vec::new();
    for system in systems {
        let whole = format!("LIMIT={limit}\n{WORDS}\nfs={system}\n{script}\nclear");
        match story.machine.sh(&whole) {
            Ok(told) => {
                let told = if told.is_empty() { "as it should" } else { &told };
                story.note(format!("{system}: {}", told.replace('\n', "; ")));
            }
            Err(error) => failed.push(format!("{system}: {error}")),
        }
        story.machine.sh(&format!("LIMIT={limit}\n{WORDS}\nclear"))?;
    }
    if failed.is_empty() { Ok(()) } else { Err(failed.join("\n\n")) }
}

/// Writes are refused, reads are answered, also by a server that starts on the full disk; once there is
/// room, writes work again without a restart.
pub fn full(story: &mut Story) -> Outcome {
    let script = r#"
make $fs >/dev/null; serve; soon write before >/dev/null
fill
for i in $(seq 200); do said=$(write during-$i 2>&1) || break; done
[[ $i -lt 200 ]] || fail 'writes went on'
echo "refused: $(echo "$said" | tail -n 1 | cut -c 1-150)"
exists before >/dev/null || fail 'no read on a full disk'
kill9
serve; exists before >/dev/null || fail 'no read after a start on a full disk'
rm /mnt/try/fill /mnt/try/fill2
soon write after; soon exists after
"#;
    on_each(story, &SYSTEMS, script)
}

/// The same without inodes. xfs and btrfs make inodes as they need them.
pub fn inodes(story: &mut Story) -> Outcome {
    let script = r#"
make $fs 96M 400 >/dev/null; serve; soon write before >/dev/null
mkdir /mnt/try/many; for i in $(seq 2000); do : 2>/dev/null >/mnt/try/many/$i || break; done 2>/dev/null
[[ $i -lt 2000 ]] || fail 'there is no end of inodes'
exists before >/dev/null || fail 'no read'
kill9
serve; exists before >/dev/null || fail 'no read after a start without inodes'
soon write during # needs no new file
rm -r /mnt/try/many
soon write after
"#;
    on_each(story, &["ext4", "tmpfs"], script)
}

/// A disk that fails makes the file system read-only (ext4, btrfs) or dead (xfs). Nothing that was
/// acknowledged is lost, a start on it says what is wrong, and after a repair everything is there.
pub fn read_only(story: &mut Story) -> Outcome {
    let script = r#"
make $fs >/dev/null; serve; soon write before >/dev/null
if [[ $fs != tmpfs ]]; then
  sectors=$(blockdev --getsz /dev/loop7)
  dmsetup suspend --noflush --nolockfs try
  echo "0 $sectors flakey /dev/loop7 0 0 60 1 error_writes" | dmsetup reload try
  dmsetup resume try
  for i in $(seq 20); do said=$(write during-$i 2>&1) || break; done
  [[ $i -lt 20 ]] || fail 'writes went on'
  echo "refused: $(echo "$said" | tail -n 1 | cut -c 1-150)"
  kill9; umount /mnt/try
  dmsetup suspend --noflush --nolockfs try
  echo "0 $sectors linear /dev/loop7 0" | dmsetup reload try
  dmsetup resume try
  [[ $fs != ext4 ]] || fsck.ext4 -p /dev/mapper/try >/dev/null || [[ $? -le 1 ]]
  mount -t $fs /dev/mapper/try /mnt/try
  serve; exists before >/dev/null || fail 'a write was lost'
fi
stop; mount -o remount,ro /mnt/try
launch; soon ended_or_reads
echo "start: $(journalctl -u try --no-pager -o cat | grep -i -E 'read-only|Read-only' | tail -n 1 | cut -c 1-150)"
journalctl -u try --no-pager -o cat | grep -q -i read-only || fail 'the cause is not told'
stop; mount -o remount,rw /mnt/try
serve; soon write after
"#;
    let script = format!("ended_or_reads() {{ ended || exists before; }}\n{script}");
    on_each(story, &SYSTEMS, &script)
}

/// Each write takes a fifth of a second.
pub fn slow(story: &mut Story) -> Outcome {
    let script = r#"
make $fs >/dev/null
sectors=$(blockdev --getsz /dev/loop7)
dmsetup suspend try
echo "0 $sectors delay /dev/loop7 0 0 /dev/loop7 0 200" | dmsetup reload try
dmsetup resume try
began=$SECONDS; serve; echo "ready after $((SECONDS - began)) s"
began=$SECONDS; for i in 1 2 3 4 5; do write slow-$i >/dev/null; done; echo "5 writes: $((SECONDS - began)) s"
if journalctl -u try --no-pager -o cat | grep -E 'takes no writes|no leader|panick'; then fail 'a slow disk is told as a broken one'; fi
kill9; serve; exists slow-5 >/dev/null || fail 'a write was lost'
"#;
    on_each(story, &["ext4", "xfs"], script)
}
