//! Servers that join with a token, each with a member of a real etcd. Without an etcd in the cache or on the
//! path these tests print `skipped`.

use std::fs;
use std::net::Ipv4Addr;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testkit::{places, wait};

use crate::several::program;
use crate::support::{LONG, Server};

const MAPS: &str = "/api/v1/namespaces/default/configmaps";

/// A server of a cluster on this machine.
struct One {
    server: Server,
    address: Ipv4Addr,
    name: &'static str,
    etcd: String,
}

impl One {
    fn new(name: &'static str) -> Result<Option<Self>> {
        let Some(program) = program() else { return Ok(None) };
        let (address, etcd) = (places::own_loopback(), program.display().to_string());
        Ok(Some(Self { server: Server::prepared_at(address)?, address, name, etcd }))
    }

    /// Starts it; does not wait.
    fn launch(&mut self, arguments: &[&str]) -> Result<()> {
        let address = self.address.to_string();
        let own = ["--advertise-address", &address, "--node-name", self.name];
        let binary = ["--etcd-binary", &self.etcd];
        self.server.launch_with(&[&own[..], &binary, arguments].concat())
    }

    fn start(&mut self, arguments: &[&str]) -> Result<()> {
        self.launch(arguments)?;
        self.server.ready()
    }

    fn join(&mut self, first: &Self, arguments: &[&str]) -> Result<()> {
        let token = first.servers_token()?;
        self.launch(&[&["--server", &first.url()?, "--token", &token], arguments].concat())
    }

    /// Tries to join with a token, and returns what it says at its end.
    fn refused(first: &Self, name: &'static str, token: &str, more: &[&str]) -> Result<String> {
        let mut one = Self::new(name)?.context("there is an etcd")?;
        let url = first.url()?;
        one.launch(&[&["--server", &url, "--token", token], more].concat())?;
        one.server.ends()
    }

    fn url(&self) -> Result<String> {
        let config = self.server.kubeconfig()?;
        let line = config.lines().find_map(|line| line.trim().strip_prefix("server: "));
        Ok(line.context("the kubeconfig names the server")?.trim_matches('"').to_owned())
    }

    fn servers_token(&self) -> Result<String> {
        wait::until(LONG, "the servers' token is there", || {
            Ok(fs::read_to_string(self.server.data().join("server-token"))?)
        })
    }

    fn write(&self, name: &str) -> Result<()> {
        let map = json!({"metadata": {"name": name}}).to_string();
        wait::until(LONG, &format!("{name} is written"), || {
            let answer = self.server.api()?.post(MAPS, &map, LONG)?;
            ensure!(matches!(answer.status, 201 | 409), "{}", answer.body);
            Ok(())
        })
    }

    fn reads(&self, name: &str) -> Result<()> {
        wait::until(LONG, &format!("{name} is read"), || {
            let answer = self.server.api()?.get(&format!("{MAPS}/{name}"), LONG)?;
            ensure!(answer.status == 200, "{}", answer.body);
            Ok(())
        })
    }

    fn revision(&self) -> Result<u64> {
        let list: Value = serde_json::from_str(&self.server.api()?.get(MAPS, LONG)?.body)?;
        let text = list["metadata"]["resourceVersion"].as_str().context("a list has one")?;
        Ok(text.parse()?)
    }

    /// The names of etcd's members that vote.
    fn voters(&self) -> Result<Vec<String>> {
        let text = self.server.decapod(&["member", "list"])?;
        let mut names: Vec<String> = text
            .lines()
            .skip(1)
            .filter_map(|line| {
                let words: Vec<&str> = line.split_whitespace().collect();
                (words.get(2) == Some(&"yes")).then(|| words[1].to_owned())
            })
            .collect();
        names.sort();
        Ok(names)
    }
}

/// A server with an embedded store becomes the first of three; one dies and is replaced, one is removed, and
/// in the end one is left alone.
#[test]
fn servers_join_and_leave() -> Result<()> {
    let Some(mut first) = One::new("n1")? else { return Ok(()) };
    first.start(&[])?;
    first.write("from-before")?;
    let before = first.revision()?;
    first.server.stop()?;
    first.start(&["--cluster-init"])?;
    first.reads("from-before")?;
    ensure!(first.revision()? > before, "revisions go on");
    refusals(&first)?;
    no_program(&first)?;

    let mut second = One::new("n2")?.context("there is an etcd")?;
    let begun = wait::now();
    second.join(&first, &[])?;
    second.server.ready()?;
    println!("the second server joined in {:?}", begun.elapsed());
    let mut third = One::new("n3")?.context("there is an etcd")?;
    third.join(&first, &[])?;
    third.server.ready()?;
    first.write("from-first")?;
    third.reads("from-first")?;
    ensure!(first.voters()? == ["n1", "n2", "n3"], "{:?}", first.voters());
    same_name(&first)?;

    // A restart needs no flags.
    third.server.stop()?;
    third.start(&[])?;
    third.reads("from-before")?;
    // Its etcd dies with it.
    second.server.kill()?;
    first.write("without-second")?;
    third.reads("without-second")?;
    let mut again = One::new("n2")?.context("there is an etcd")?;
    again.join(&third, &[])?;
    again.server.ready()?;
    again.reads("without-second")?;
    ensure!(first.voters()? == ["n1", "n2", "n3"], "{:?}", first.voters());

    first.server.decapod(&["member", "remove", "n3"])?;
    let told = third.server.ends()?;
    ensure!(told.contains("the server n3 was removed from its cluster"), "{told}");
    third.launch(&[])?;
    let told = third.server.ends()?;
    ensure!(told.contains("to join again, delete"), "{told}");
    first.write("of-two")?;
    again.reads("of-two")?;

    let snapshot = first.server.data().join("of-two.db").display().to_string();
    first.server.decapod(&["snapshot", "save", &snapshot])?;
    first.write("after-snapshot")?;
    wait::until(LONG, "the first server knows the one that joined after its start", || {
        let text = fs::read_to_string(first.server.data().join("etcd-members"))?;
        ensure!(text.contains(&again.address.to_string()), "{text}");
        Ok(())
    })?;
    first.server.stop()?;
    for reset in [&["--cluster-reset"][..], &["--cluster-reset", "--from-snapshot", &snapshot]] {
        first.launch(reset)?;
        let told = first.server.ends()?;
        ensure!(told.contains("other servers of this cluster still run"), "{told}");
    }

    // The majority is lost.
    again.server.kill()?;
    first.launch(&["--cluster-reset"])?;
    let told = first.server.ends()?;
    ensure!(told.contains("this server is the whole cluster now"), "{told}");
    first.start(&[])?;
    first.reads("of-two")?;
    first.reads("after-snapshot")?;
    ensure!(first.voters()? == ["n1"], "{:?}", first.voters());

    // All data are wrong.
    let newest = first.revision()?;
    first.server.stop()?;
    first.launch(&["--cluster-reset", "--from-snapshot", &snapshot])?;
    let told = first.server.ends()?;
    ensure!(told.contains("this server is the whole cluster now"), "{told}");
    first.start(&[])?;
    first.reads("of-two")?;
    let gone = first.server.api()?.get(&format!("{MAPS}/after-snapshot"), LONG)?;
    ensure!(gone.status == 404, "{}", gone.body);
    ensure!(first.revision()? > newest, "revisions go on");
    first.server.stop().map(drop)
}

/// Each refusal is a sentence that says what to do.
fn refusals(first: &One) -> Result<()> {
    let token = first.servers_token()?;
    let nodes = fs::read_to_string(first.server.data().join("token"))?;
    let changed = format!("{}x", token.trim());
    let bare = token.split("::").nth(1).unwrap_or_default();
    let stranger = format!("K10{}::{bare}", "0".repeat(64));
    let check = |token: &str, more: &[&str], expected: &str| -> Result<()> {
        let told = One::refused(first, "n9", token, more)?;
        ensure!(told.contains(expected), "{expected}: {told}");
        Ok(())
    };
    check(&changed, &[], "does not accept the token")?;
    check(&nodes, &[], "the token is one for nodes")?;
    check(bare, &[], "the token has no hash")?;
    check(&stranger, &[], "does not belong to the cluster of the token")?;
    check(&token, &["--cluster-cidr", "10.99.0.0/16"], "--cluster-cidr is \"10.99.0.0/16\" here")?;
    check(&token, &["--datastore-endpoint", "http://127.0.0.1:1"], "leave out --datastore-endpoint")
}

/// A server whose etcd cannot run must not leave a dead member behind.
fn no_program(first: &One) -> Result<()> {
    let mut one = One::new("n9")?.context("there is an etcd")?;
    one.etcd = "/bin/true".into();
    one.join(first, &[])?;
    let told = one.server.ends()?;
    ensure!(told.contains("is not etcd 3.4 or newer"), "{told}");
    let list = first.server.decapod(&["member", "list"])?;
    ensure!(list.lines().count() == 2, "a heading and one member: {list}");
    Ok(())
}

fn same_name(first: &One) -> Result<()> {
    let told = One::refused(first, "n2", &first.servers_token()?, &[])?;
    ensure!(told.contains("the cluster has a server n2 already"), "{told}");
    ensure!(first.voters()? == ["n1", "n2", "n3"], "it must not be replaced");
    Ok(())
}
