//! `--server URL --token TOKEN`: from a token to the cluster's authorities, and to a voting member of etcd.
//!
//! ```text
//! cluster-info ► its authority has the token's hash ► Secret decapod-servers ► opened with the token
//!    ► clock, version, ranges agree ► files written ► learner added ► etcd starts ► promoted
//! ```
//!
//! Invariants: nothing is sent before the server's authority was checked, and nothing is written before all
//! checks have passed. Each refusal is one sentence that names what to do. A start that was interrupted is
//! repeated from the beginning.

use std::time::Duration;

use anyhow::{Context, bail};
use client::{Client, ErrorExt};
use etcd::cluster::{Member as Listed, Refusal};
use k8s_openapi::api::core::v1::Secret;
use pki::JoinToken;
use tokio::time::Instant;
use transport::{ClientOptions, HttpClient, Token};

use super::bundle::{Bundle, TOKEN};
use super::member::{self, Member, Start};
use super::{Own, insist};
use crate::agent;
use crate::flags;
use crate::process::say;

/// Clocks that differ by more make certificates and Leases invalid.
const SKEW: i64 = 60;
const ANSWER: Duration = Duration::from_secs(5);
/// A server that is ready has published its keys by then.
const PUBLISHED: Duration = Duration::from_secs(5);
const AGAIN: Duration = Duration::from_millis(500);

/// The result of the first half.
pub struct Joined {
    /// Client URLs of etcd's members.
    members: Vec<String>,
}

/// Gets the bundle and writes its files.
pub async fn join(flags: &flags::Server, own: &Own) -> anyhow::Result<Joined> {
    let server = &flags.cluster.server[0];
    agent::host_port(server)?;
    let token = token(flags)?;
    let ca_pem = agent::authority_of(server, &token).await?;
    let http = HttpClient::new(&ClientOptions {
        server: server.clone(),
        ca_pem: Some(ca_pem),
        token: Some(Token::fixed(token.bootstrap().to_string())),
        ..ClientOptions::default()
    })?;
    check_clock(server, &http).await?;
    let secret = secret(server, &http).await?;
    let sealed = control::joining::text(&secret, control::joining::BUNDLE).unwrap_or_default();
    let bundle = Bundle::open(&token.secret, &sealed)
        .with_context(|| format!("the token does not open the keys that {server} shows"))?;
    bundle.check(flags)?;
    match (bundle.has_etcd, flags.datastore.endpoints.is_empty()) {
        (true, false) => {
            bail!("the servers of this cluster run its etcd: leave out --datastore-endpoint")
        }
        (false, true) => bail!(
            "this cluster keeps its state in an etcd of its own: give the servers' --datastore-endpoint"
        ),
        _ => {}
    }
    if bundle.has_etcd {
        // A member that is added and does not start would count in the cluster as a dead one.
        member::program(&flags.cluster)?;
    }
    let members = control::joining::text(&secret, control::joining::MEMBERS).unwrap_or_default();
    let members: Vec<String> =
        members.split(',').filter(|url| !url.is_empty()).map(str::to_owned).collect();
    bundle.write(&own.data_dir)?;
    let path = own.data_dir.join(TOKEN);
    pki::write_private(&path, token.to_string().as_bytes(), 0o600)?;
    say(&format!("joining the cluster at {server}"));
    Ok(Joined { members })
}

fn token(flags: &flags::Server) -> anyhow::Result<JoinToken> {
    let text = match (&flags.token, &flags.cluster.token_file) {
        (Some(text), _) => text.clone(),
        (None, Some(path)) => std::fs::read_to_string(path)
            .with_context(|| format!("cannot read --token-file {}", path.display()))?,
        (None, None) => bail!(
            "--server needs --token or --token-file: the content of <data-dir>/{TOKEN} of that server"
        ),
    };
    let token = JoinToken::parse(&text).context("the token cannot be used")?;
    if token.ca_hash.is_none() {
        bail!(
            "the token has no hash of the cluster's authority: give the whole content of <data-dir>/{TOKEN} of that server"
        );
    }
    Ok(token)
}

async fn secret(server: &str, http: &HttpClient) -> anyhow::Result<Secret> {
    let client = Client::over(http.clone(), "decapod-server");
    let path = format!("/api/v1/namespaces/kube-system/secrets/{}", control::joining::SECRET);
    let begun = Instant::now();
    let error = loop {
        match tokio::time::timeout(ANSWER, client.get::<Secret>(&path)).await {
            Ok(Ok(secret)) => return Ok(secret),
            // A server that has just started has not published it yet, or does not know its own roles.
            Ok(Err(error))
                if matches!(error.code(), 401 | 403 | 404) && begun.elapsed() < PUBLISHED =>
            {
                tokio::time::sleep(AGAIN).await;
            }
            Ok(Err(error)) => break error,
            Err(_) => bail!("the server {server} does not answer within {ANSWER:?}"),
        }
    };
    match error.code() {
        401 => bail!(
            "the server {server} does not accept the token: is it the content of <data-dir>/{TOKEN} there?"
        ),
        403 => bail!(
            "the token is one for nodes: servers join with the content of <data-dir>/{TOKEN} of {server}, which a server with --cluster-init has"
        ),
        404 => bail!(
            "the server {server} has nothing to join: start it with --cluster-init first, or wait until it is ready"
        ),
        _ => bail!("the server {server}: {}", error.text()),
    }
}

/// Compares this machine's clock with the `Date` of an answer.
async fn check_clock(server: &str, http: &HttpClient) -> anyhow::Result<()> {
    let request = http::Request::get("/version").body(transport::empty())?;
    let answer = tokio::time::timeout(ANSWER, http.request(request)).await;
    let Ok(Ok(answer)) = answer else { return Ok(()) };
    let date = answer.headers().get(http::header::DATE).and_then(|date| date.to_str().ok());
    let Some(ahead) = date.and_then(|date| ahead_of(date, base::clock::now())) else {
        return Ok(());
    };
    if ahead.abs() > SKEW {
        let how = if ahead > 0 { "ahead of" } else { "behind" };
        bail!(
            "the clock of this machine is {} s {how} that of {server}: set it, for example with NTP",
            ahead.abs()
        );
    }
    Ok(())
}

/// By how many seconds `now` is ahead of the date in a header.
fn ahead_of(date: &str, now: jiff::Timestamp) -> Option<i64> {
    let there = jiff::fmt::rfc2822::parse(date).ok()?;
    Some(now.as_second() - there.timestamp().as_second())
}

/// Adds this member to etcd, starts it, and waits until it votes.
pub async fn start(flags: &flags::Server, own: &Own, joined: &Joined) -> anyhow::Result<Member> {
    let cluster = own.cluster(&joined.members)?;
    make_room(own, &insist("listing etcd's members", async || cluster.members().await).await?)
        .await?;
    if own.has_data() {
        // Of an attempt that was interrupted: the cluster has forgotten that member.
        super::aside(&own.etcd())?;
    }
    let peer = own.peer_url();
    let cluster = own.cluster(&joined.members)?;
    let listed = insist("listing etcd's members", async || cluster.members().await).await?;
    for dead in listed.iter().filter(|one| one.name == own.name || one.peer_urls.contains(&peer)) {
        say(&format!("replacing etcd's member {} ({:x})", own.name, dead.id));
        insist("removing the dead member", async || match cluster.remove(dead.id).await {
            Err(Refusal::Never(why)) if why.contains("member not found") => Ok(()),
            other => other,
        })
        .await?;
    }
    let all = insist("adding a member to etcd", async || cluster.add_learner(&peer).await).await?;
    let own_id = all.iter().find(|one| one.peer_urls.contains(&peer)).map(|one| one.id);
    let own_id = own_id.context("etcd does not list the member that was added")?;
    own.remember(&[&[own.client_url()][..], &joined.members].concat())?;
    let member = Member::start(own, flags, Start::Added(initial_cluster(own, &all)))?;
    let promoting = insist("waiting until etcd's data are here", async || {
        match (member.has_failed(), cluster.promote(own_id).await) {
            (Some(why), _) => Err(Refusal::Never(format!("etcd does not start: {why}"))),
            (None, Err(Refusal::Never(why))) if why.contains("can only promote a learner") => {
                Ok(())
            }
            (None, outcome) => outcome,
        }
    });
    if let Err(error) = promoting.await {
        member.stop().await;
        return Err(error);
    }
    say(&format!("etcd has the member {}", own.name));
    Ok(member)
}

/// Refuses a name that a living server has.
async fn make_room(own: &Own, listed: &[Listed]) -> anyhow::Result<()> {
    let Some(same) = listed.iter().find(|one| one.name == own.name) else { return Ok(()) };
    if same.client_urls.is_empty() || same.client_urls.contains(&own.client_url()) {
        // It is this machine's of before.
        return Ok(());
    }
    let there = own.cluster(&same.client_urls)?;
    if tokio::time::timeout(ANSWER, there.version()).await.is_ok_and(|answer| answer.is_ok()) {
        bail!(
            "the cluster has a server {} already, at {}: choose another name with --node-name",
            own.name,
            same.client_urls.join(" ")
        );
    }
    Ok(())
}

/// `name=peer,…` of all members; one that has not started has no name, and is this one.
fn initial_cluster(own: &Own, all: &[Listed]) -> String {
    let mut parts = vec![];
    for one in all {
        let name = if one.peer_urls.contains(&own.peer_url()) { &own.name } else { &one.name };
        if !name.is_empty() {
            parts.extend(one.peer_urls.iter().map(|url| format!("{name}={url}")));
        }
    }
    parts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clocks_are_compared() {
        let now = "2026-11-23T08:50:00Z".parse().expect("a time");
        let ahead = |date: &str| ahead_of(date, now);
        assert_eq!(ahead("Mon, 23 Nov 2026 08:49:37 GMT"), Some(23));
        assert_eq!(ahead("Mon, 23 Nov 2026 09:50:00 GMT"), Some(-3600));
        assert_eq!(ahead("yesterday"), None);
    }

    #[test]
    fn the_list_of_members_names_all_that_run() {
        let own = Own {
            name: "n3".into(),
            address: std::net::IpAddr::from([192, 0, 2, 3]),
            data_dir: "/nonexistent".into(),
        };
        let member = |name: &str, address: &str| Listed {
            name: name.into(),
            peer_urls: vec![format!("https://{address}:2380")],
            ..Listed::default()
        };
        let all = [member("n1", "192.0.2.1"), member("", "192.0.2.3"), member("", "192.0.2.9")];
        let expected = "n1=https://192.0.2.1:2380,n3=https://192.0.2.3:2380";
        assert_eq!(initial_cluster(&own, &all), expected);
    }
}
