//! get, list and watch: the state for a resourceVersion, pages, and the events of a watch.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use base::clock;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use jiff::{SignedDuration, Timestamp};
use machinery::status::Reason;
use serde::{Deserialize, Serialize};
use store::{KeyRange, RangeRequest, Revision};
use tokio::time::Instant;

use super::{EventStream, List, ListOptions, Registry, Stored, WatchEvent, store_error};
use crate::StatusError;
use crate::cacher::{CacheEvent, Cacher, Cursor, Entry, Scope, parse_key, storage_prefix};
use crate::query::parse_unsigned;
use crate::request::Key;
use crate::resource::{Resource, Storage};

/// Interval of a quiet watch's bookmarks. Upstream: about a minute.
const BOOKMARK_PERIOD: Duration = Duration::from_secs(60);
const TOKEN_VERSION: &str = "meta.k8s.io/v1";
/// Number of keys read from the store at once for a page in history.
const PAGE: usize = 1000;

/// How long the pages of one list show the same state. Upstream's compactor keeps the states of the last 5
/// minutes. Here history is kept longer, but clients that abandon a list should get the same error as
/// early as with upstream.
const PAGES_LAST: SignedDuration = SignedDuration::from_mins(5);

/// The end of a page: the start of the next one, the list's revision, and the time of the first page.
#[derive(Default, Serialize, Deserialize)]
#[serde(default)]
struct ContinueToken {
    v: String,
    rv: i64,
    start: String,
    /// In seconds since 1970; 0 in a token that does not expire.
    since: i64,
    /// Number of remaining objects at the revision; 0 if it is unknown.
    left: u64,
}

impl ContinueToken {
    fn of(rv: i64, start: String, since: i64) -> Self {
        Self { v: TOKEN_VERSION.into(), rv, start, since, left: 0 }
    }

    /// The last object of the page before. `None` if a client has made the token.
    fn last(&self, row: &Resource, scope: &Scope) -> Option<Key> {
        let path = self.start.trim_start_matches('/').strip_suffix('\0')?;
        match path.split_once('/') {
            None if !row.namespaced || !scope.namespace.is_empty() => {
                Some(Key::new(scope.namespace.clone(), path))
            }
            Some((namespace, name)) if row.namespaced && scope.namespace.is_empty() => {
                Some(Key::new(namespace, name))
            }
            _ => None,
        }
    }

    fn encode(&self) -> String {
        URL_SAFE_NO_PAD.encode(serde_json::to_vec(self).expect("plain strings and numbers"))
    }

    /// Why no list goes on at this place. Upstream: `DecodeContinue`.
    fn invalid(&self) -> Option<&str> {
        let mut parts = self.start.strip_prefix('/').unwrap_or(&self.start).split('/');
        if self.rv == 0 {
            Some("incorrect encoded start resourceVersion (version meta.k8s.io/v1)")
        } else if self.start.is_empty() {
            Some("encoded start key empty (version meta.k8s.io/v1)")
        } else {
            parts.any(|part| matches!(part, "" | "." | "..")).then_some(&*self.start)
        }
    }

    fn is_over(&self) -> bool {
        let since = Timestamp::from_second(self.since).unwrap_or(Timestamp::MAX);
        self.rv > 0 && self.since > 0 && clock::now().duration_since(since) > PAGES_LAST
    }
}

fn is_at(object: &dyn machinery::Object, key: &Key) -> bool {
    object.name() == key.name && object.namespace() == key.namespace
}

/// An object of a resource that is not stored.
fn computed(row: &Arc<Resource>, object: &dyn machinery::Object) -> Stored {
    Stored::new(row.clone(), object.encode(), Revision(0))
}

impl Registry {
    pub async fn get(
        &self,
        row: &Arc<Resource>,
        key: &Key,
        resource_version: Option<&str>,
    ) -> Result<Stored, StatusError> {
        let wanted = parse_version(resource_version)?;
        if !row.is_stored() {
            let all = self.computed(row, key).await?;
            let found = all.into_iter().find(|one| is_at(&**one, key));
            // Upstream's error names the storage key.
            let name = match row.namespaced {
                true => format!("{}/{}", key.namespace, key.name),
                false => key.name.clone(),
            };
            let missing = || StatusError::not_found(&row.group, &row.singular, &name);
            return found.map(|one| computed(row, &*one)).ok_or_else(missing);
        }
        if wanted.is_some_and(|wanted| wanted.0 > 0) {
            self.cacher(row).wait_for(wanted.unwrap_or_default()).await?;
        }
        let found = self.current(row, key).await?;
        let found =
            found.ok_or_else(|| StatusError::not_found(&row.group, &row.plural, &key.name))?;
        found.check()?;
        Ok(found)
    }

    async fn computed(
        &self,
        row: &Resource,
        wanted: &Key,
    ) -> Result<Vec<Box<dyn machinery::Object>>, StatusError> {
        match &row.storage {
            Storage::Computed(source) => source.computed(self, wanted).await,
            Storage::Stored(_) | Storage::Review(_) => Ok(vec![]),
        }
    }

    pub async fn list(
        &self,
        row: &Arc<Resource>,
        namespace: &str,
        options: &ListOptions,
    ) -> Result<List, StatusError> {
        let scope = self.scope(row, namespace, options)?;
        if !row.is_stored() {
            let all = self.computed(row, &Key::new(namespace, "")).await?;
            let items = all.iter().filter(|one| scope.selects(&***one));
            let items = items.map(|one| computed(row, &**one)).collect();
            let revision = Revision(0);
            return Ok(List { items, revision, continue_token: None, remaining: None });
        }
        if let Some(token) = options.continue_token.as_deref().filter(|token| !token.is_empty()) {
            return self.list_page(row, &scope, options, token).await;
        }
        let wanted = parse_version(options.resource_version.as_deref())?;
        if options.resource_version_match.as_deref() == Some("Exact") {
            let at = wanted.unwrap_or_default();
            let start = storage_scope(row, namespace);
            let since = clock::now().as_second();
            return self.list_history(row, &scope, options.limit, at, &start, since).await;
        }
        let cacher = self.cacher(row);
        match wanted {
            Some(Revision(0)) => cacher.ready().await?,
            Some(revision) => cacher.wait_for(revision).await?,
            None => cacher.wait_for(self.revision().await?).await?,
        }
        let (entries, revision, left) = cacher.list(&scope, options.limit);
        let remaining = (left > 0 && scope.selects_all()).then_some(left as u64);
        let continue_token = match (left, entries.last()) {
            (1.., Some(last)) => {
                let since = clock::now().as_second();
                Some(encode_token(&relative(&last.key, &scope), revision, since, remaining))
            }
            _ => None,
        };
        let items = all_stored(row, entries.iter().map(|entry| &**entry))?;
        Ok(List { items, revision, continue_token, remaining })
    }

    async fn list_page(
        &self,
        row: &Arc<Resource>,
        scope: &Scope,
        options: &ListOptions,
        token: &str,
    ) -> Result<List, StatusError> {
        let bad = |why: &str| {
            let head = "invalid continue token: continue key is not valid";
            StatusError::bad_request(format!("{head}: {why}"))
        };
        let bytes = URL_SAFE_NO_PAD
            .decode(token.trim_end_matches('='))
            .map_err(|_| bad(&not_base64(token)))?;
        let token: ContinueToken =
            serde_json::from_slice(&bytes).map_err(|error| bad(&not_json(&bytes, &error)))?;
        if token.v != TOKEN_VERSION {
            return Err(bad(&format!(
                "server does not recognize this encoded version {}",
                token.v
            )));
        }
        if let Some(why) = token.invalid() {
            return Err(bad(why));
        }
        if token.is_over() {
            return Err(expired_page(token.start));
        }
        let prefix = storage_scope(row, &scope.namespace);
        let start = format!("{prefix}{}", token.start.trim_start_matches('/'));
        let current = self.revision().await?;
        // A negative revision means the newest state: the inconsistent continuation of a list whose revision
        // is compacted.
        let (at, since) = match token.rv {
            1.. => (Revision(token.rv as u64), token.since),
            _ => (current, clock::now().as_second()),
        };
        if let Some(page) = self.list_cached(row, scope, options.limit, &token).await? {
            return Ok(page);
        }
        match self.list_history(row, scope, options.limit, at, &start, since).await {
            Err(error) if error.is(Reason::Expired) => Err(expired_page(token.start)),
            other => other,
        }
    }

    /// A later page from the watch cache; see [`Cacher::page`]. `None` if only the store's history has it, or
    /// the reason why there is none.
    async fn list_cached(
        &self,
        row: &Arc<Resource>,
        scope: &Scope,
        limit: usize,
        token: &ContinueToken,
    ) -> Result<Option<List>, StatusError> {
        let counted = scope.selects_all();
        let at = Revision(token.rv.try_into().unwrap_or_default());
        let Some(after) = token.last(row, scope).filter(|_| at.0 > 0) else { return Ok(None) };
        if (counted && token.left == 0) || self.0.store.check_readable(at).await.is_err() {
            return Ok(None);
        }
        let cacher = self.cacher(row);
        if cacher.wait_for(at).await.is_err() {
            return Ok(None);
        }
        let Some(page) = cacher.page(scope, limit, &after, at) else { return Ok(None) };
        let left = token.left.saturating_sub(page.entries.len() as u64);
        let remaining = (page.more && counted).then_some(left);
        let last = page.entries.last().filter(|_| page.more);
        let continue_token =
            last.map(|last| encode_token(&relative(&last.key, scope), at, token.since, remaining));
        let items = all_stored(row, page.entries.iter().map(|entry| &**entry))?;
        Ok(Some(List { items, revision: at, continue_token, remaining }))
    }

    /// Reads the state at a revision from the store, beginning at `start`: a page of a list that began at
    /// `since`.
    async fn list_history(
        &self,
        row: &Arc<Resource>,
        scope: &Scope,
        limit: usize,
        at: Revision,
        start: &str,
        since: i64,
    ) -> Result<List, StatusError> {
        let prefix = storage_prefix(row.prefix().unwrap_or_default());
        let end = KeyRange::prefix(storage_scope(row, &scope.namespace)).end;
        let mut start = Bytes::from(start.to_owned());
        let mut entries: Vec<Entry> = vec![];
        loop {
            let range = KeyRange { start: start.clone(), end: end.clone() };
            let most = if limit > 0 && scope.selects_all() { limit.min(PAGE) } else { PAGE };
            let request =
                RangeRequest { range, limit: most, revision: Some(at), count_only: false };
            let asked = self.0.store.range(request);
            let page = self.0.numbers.timed("list", row, asked).await.map_err(store_error)?;
            let mut left = page.count;
            for kv in &page.kvs {
                left -= 1;
                let Some(key) = parse_key(&prefix, row.namespaced, &kv.key) else { continue };
                let plain = kv.value.bytes();
                let entry = Entry::parse(row, key, kv.value.clone(), &plain, kv.mod_revision)?;
                if !scope.matches(&entry) {
                    continue;
                }
                let last = relative(&entry.key, scope);
                entries.push(entry);
                if limit > 0 && entries.len() == limit && left > 0 {
                    let remaining = scope.selects_all().then_some(left as u64);
                    let continue_token = Some(encode_token(&last, at, since, remaining));
                    let items = all_stored(row, &entries)?;
                    return Ok(List { items, revision: at, continue_token, remaining });
                }
            }
            match page.kvs.last() {
                Some(last) if page.more => start = [&last.key[..], b"\0"].concat().into(),
                _ => {
                    let items = all_stored(row, &entries)?;
                    return Ok(List { items, revision: at, continue_token: None, remaining: None });
                }
            }
        }
    }

    pub async fn watch(
        &self,
        row: &Arc<Resource>,
        namespace: &str,
        options: &ListOptions,
    ) -> Result<EventStream, StatusError> {
        let scope = self.scope(row, namespace, options)?;
        let wanted = parse_version(options.resource_version.as_deref())?;
        let cacher = self.cacher(row);
        cacher.ready().await?;
        let mut pending = VecDeque::new();
        let start = match (wanted, options.send_initial_events) {
            (Some(revision), None | Some(false)) if revision.0 > 0 => revision,
            (None, Some(false)) => {
                let now = self.revision().await?;
                cacher.wait_for(now).await?;
                now
            }
            (wanted, initial) => {
                match wanted {
                    Some(Revision(0)) => {}
                    Some(revision) => cacher.wait_for(revision).await?,
                    None => cacher.wait_for(self.revision().await?).await?,
                }
                let (entries, revision, _) = cacher.list(&scope, 0);
                let all = all_stored(row, entries.iter().map(|entry| &**entry))?;
                pending.extend(all.into_iter().map(WatchEvent::Added));
                if initial == Some(true) {
                    pending.push_back(WatchEvent::Bookmark { revision, initial_events_end: true });
                }
                revision
            }
        };
        let watcher = Watcher {
            row: row.clone(),
            scope,
            cursor: cacher.cursor(start),
            cacher,
            pending,
            bookmarks: options.allow_bookmarks,
            next_bookmark: Instant::now() + BOOKMARK_PERIOD,
            deadline: options.timeout.map(|timeout| Instant::now() + timeout),
            over: false,
        };
        Ok(Box::pin(futures::stream::unfold(watcher, Watcher::step)))
    }

    pub(super) fn scope(
        &self,
        row: &Resource,
        namespace: &str,
        options: &ListOptions,
    ) -> Result<Scope, StatusError> {
        for requirement in &options.fields.requirements {
            let name = requirement.key.as_str();
            let generic =
                name == "metadata.name" || (name == "metadata.namespace" && row.namespaced);
            if !generic && !row.fields.contains(name) {
                let message = format!(
                    "Unable to find {:?} that match label selector {:?}, field selector {:?}: field label not supported: {name}",
                    format!("{}, Resource={}", group_version(row), row.plural),
                    options.labels.to_string(),
                    options.fields.to_string(),
                );
                return Err(StatusError::bad_request(message));
            }
        }
        let fields = options.fields.clone();
        Ok(Scope { namespace: namespace.into(), labels: options.labels.clone(), fields })
    }
}

fn group_version(row: &Resource) -> String {
    format!("{}/{}", row.group, row.version)
}

/// One running watch: pending events, and the cursor for later ones.
struct Watcher {
    row: Arc<Resource>,
    scope: Scope,
    cacher: Arc<Cacher>,
    cursor: Cursor,
    pending: VecDeque<WatchEvent>,
    bookmarks: bool,
    next_bookmark: Instant,
    deadline: Option<Instant>,
    over: bool,
}

impl Watcher {
    async fn step(mut self) -> Option<(WatchEvent, Self)> {
        loop {
            if let Some(event) = self.pending.pop_front() {
                self.over |= matches!(event, WatchEvent::Error(_));
                return Some((event, self));
            }
            if self.over {
                return None;
            }
            let wake = self.next_bookmark.min(self.deadline.unwrap_or(self.next_bookmark));
            match tokio::time::timeout_at(wake, self.cursor.next()).await {
                Ok(Ok(events)) => {
                    for event in events {
                        self.pending.extend(self.translate(&event));
                    }
                }
                Ok(Err(_)) if self.cacher.is_retired() => self.over = true,
                Ok(Err(error)) => self.pending.push_back(WatchEvent::Error(error)),
                Err(_) => self.tick(),
            }
        }
    }

    /// A timer fired: sends a bookmark, or ends the watch.
    fn tick(&mut self) {
        let now = Instant::now();
        let ends = self.deadline.is_some_and(|deadline| deadline <= now);
        if self.bookmarks {
            let revision = self.cursor.revision();
            self.pending.push_back(WatchEvent::Bookmark { revision, initial_events_end: false });
        }
        self.cacher.ask_progress();
        self.next_bookmark = now + BOOKMARK_PERIOD;
        self.over = ends;
    }

    /// The event for this watch: an object that begins to match is added, one that stops matching is deleted.
    fn translate(&self, event: &CacheEvent) -> Option<WatchEvent> {
        let matches = |entry: &&Arc<Entry>| self.scope.matches(entry);
        let now = event.entry.as_ref().filter(matches);
        let before = event.previous.as_ref().filter(matches);
        // A DELETED event carries the deleting revision.
        let show = |entry| Stored::new(self.row.clone(), event.value(entry), event.revision);
        match (before, now) {
            (None, None) => None,
            (None, Some(now)) => Some(WatchEvent::Added(show(now))),
            (Some(_), Some(now)) => Some(WatchEvent::Modified(show(now))),
            (Some(before), None) => Some(WatchEvent::Deleted(show(before))),
        }
    }
}

fn all_stored<'e>(
    row: &Arc<Resource>,
    entries: impl IntoIterator<Item = &'e Entry>,
) -> Result<Vec<Stored>, StatusError> {
    let values = entries.into_iter().map(|entry| (entry.value.clone(), entry.revision));
    Stored::all(row, &values.collect::<Vec<_>>())
}

/// Missing and empty are the same.
pub(crate) fn parse_version(text: Option<&str>) -> Result<Option<Revision>, StatusError> {
    match text {
        None | Some("") => Ok(None),
        Some(text) => match parse_unsigned(text) {
            Ok(number) => Ok(Some(Revision(number))),
            Err(why) => {
                let why = format!("resourceVersion: Invalid value: {text:?}: {why}");
                Err(StatusError::new(Reason::Unknown, why))
            }
        },
    }
}

fn storage_scope(row: &Resource, namespace: &str) -> String {
    let prefix = storage_prefix(row.prefix().unwrap_or_default());
    if namespace.is_empty() { prefix } else { format!("{prefix}{namespace}/") }
}

/// The key in the form that a token of a namespaced list has.
fn relative(key: &Key, scope: &Scope) -> Key {
    if scope.namespace.is_empty() { key.clone() } else { Key::new("", key.name.clone()) }
}

/// Go's error for text that is not base64: it names the first wrong byte.
fn not_base64(text: &str) -> String {
    let is_letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_');
    let strange = text.bytes().position(|byte| !is_letter(byte));
    let at = strange.unwrap_or_else(|| text.len().saturating_sub(1));
    format!("illegal base64 data at input byte {at}")
}

/// Go's error for bytes that are not JSON.
fn not_json(bytes: &[u8], error: &serde_json::Error) -> String {
    match bytes.first() {
        None => "unexpected end of JSON input".into(),
        Some(b'{') => error.to_string(),
        Some(first) => {
            format!("invalid character {:?} looking for beginning of value", char::from(*first))
        }
    }
}

/// The token of the page after `last`.
fn encode_token(last: &Key, revision: Revision, since: i64, left: Option<u64>) -> String {
    let path = if last.namespace.is_empty() {
        last.name.clone()
    } else {
        format!("{}/{}", last.namespace, last.name)
    };
    let token = ContinueToken::of(revision.0 as i64, format!("{path}\0"), since);
    ContinueToken { left: left.unwrap_or_default(), ..token }.encode()
}

/// 410 with a token that continues in the newest state, as upstream.
fn expired_page(start: String) -> StatusError {
    let token = ContinueToken::of(-1, start, 0).encode();
    StatusError::expired("The provided continue parameter is too old to display a consistent list result. You can start a new list without the continue parameter, or use the continue token in this response to retrieve the remainder of the results. Continuing with the provided token results in an inconsistent list - objects that were created, modified, or deleted between the time the first chunk was returned and now may show up in the list.")
        .continue_with(token)
}
