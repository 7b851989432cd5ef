// SPDX-License-Identifier: MIT OR Apache-2.0
//! Programs that may less than root: an unprivileged user's, and those in a container.

use std::process::Command;

/// Who runs a program, and what of the machine it has.
#[derive(Clone, Debug)]
pub enum Confined {
    /// The user nobody, in this group besides its own.
    User { group: Option<u32> },
    /// Root without capabilities, in mount and PID namespaces of its own with nothing in /dev but `nodes`; with a user
    /// namespace of its own or the machine's.
    Container {
        nodes: Vec<String>,
        user_namespace: bool,
    },
}

/// Without any capability, and with no way to one.
const DROP: [&str; 4] = [
    "setpriv",
    "--bounding-set=-all",
    "--inh-caps=-all",
    "--no-new-privs",
];

/// Makes the container's /dev and /proc, then becomes the program. Its first argument is the list of nodes.
const ENTER: &str = r#"
set -e
nodes=$1
shift
dev=$(mktemp -d)
mount -t tmpfs none "$dev"
mkdir "$dev/infiniband"
for node in null zero urandom $nodes; do
    touch "$dev/$node"
    mount --bind "/dev/$node" "$dev/$node"
done
mount --rbind "$dev" /dev
mount -t proc proc /proc
mount -t tmpfs none /run
touch /run/.containerenv
exec "$@"
"#;

impl Confined {
    /// The nodes that a container needs for all that the library does.
    pub fn all_nodes() -> Vec<String> {
        ["ibgda", "infiniband/uverbs0", "infiniband/uverbs1"]
            .map(String::from)
            .to_vec()
    }

    /// Runs words so.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command;
        match self {
            Self::User { group } => {
                command = Command::new("setpriv");
                command.args(["--reuid=nobody", "--regid=nogroup"]);
                match group {
                    Some(group) => command.arg(format!("--groups={group}")),
                    None => command.arg("--clear-groups"),
                };
                command.args(&DROP[1..]);
            }
            Self::Container {
                nodes,
                user_namespace,
            } => {
                command = Command::new("unshare");
                if *user_namespace {
                    command.args(["--user", "--map-root-user"]);
                }
                command.args(["--mount", "--pid", "--fork", "--kill-child"]);
                command.args(["sh", "-c", ENTER, "container", &nodes.join(" ")]);
                command.args(DROP);
            }
        }
        command.args(words);
        command
    }
}
