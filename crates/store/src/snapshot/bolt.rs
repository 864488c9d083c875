//! Writes a bbolt database sequentially.
//!
//! ```text
//! page 0, 1   meta        the root's page, the number of pages, FNV-1a of both
//! page 2      free list   empty
//! page 3…     root        a leaf: the tables by name; small ones are stored inside it
//! then        table key   its leaves, then its branches, level by level; the last is its root
//! then        table lease the same
//!
//! page        id u64 · flags u16 · count u16 · overflow u32 · elements · keys and values
//! leaf        flags u32 (1: a table) · offset u32 · key size u32 · value size u32
//! branch      offset u32 · key size u32 · page u64
//! ```
//!
//! Little endian; an offset counts from its own element; a page larger than [`PAGE`] has `overflow` more
//! pages. The layout is known before the first byte is written, because the sizes of values determine
//! all positions.

use std::io::{self, Write};

pub const PAGE: usize = 4096;
pub const HEADER: usize = 16;
pub const ELEMENT: usize = 16;
pub const MAGIC: u32 = 0xED0C_DAED;
pub const VERSION: u32 = 2;
pub const META_SIZE: usize = 64;

pub const BRANCH: u16 = 0x01;
pub const LEAF: u16 = 0x02;
pub const META: u16 = 0x04;
pub const FREE_LIST: u16 = 0x10;
/// The flag of a leaf's element that is a table.
pub const TABLE: u32 = 1;

/// The tables that etcd expects, besides `key`, `lease` and `meta`; in order.
const EMPTY: [&str; 7] =
    ["alarm", "auth", "authRoles", "authUsers", "cluster", "members", "members_removed"];

/// A key, and the size of its value.
pub struct Item {
    pub key: Vec<u8>,
    pub size: usize,
}

type Rows = Vec<(Vec<u8>, Vec<u8>)>;

/// The positions of everything.
pub struct Layout {
    root: Vec<u8>,
    root_pages: u64,
    keys: Tree,
    items: Vec<Item>,
    leases: Tree,
    lease_rows: Rows,
    pages: u64,
}

/// Consecutive elements in one page (and its overflow).
struct Span {
    page: u64,
    pages: u64,
    first: usize,
    count: usize,
}

#[derive(Default)]
struct Tree {
    leaves: Vec<Span>,
    /// From the level above the leaves up to the root; each element names a span of the level below.
    branches: Vec<Vec<Span>>,
    root: u64,
}

impl Layout {
    pub fn new(items: Vec<Item>, lease_rows: Rows, meta: Rows) -> Self {
        // The root's size does not depend on the page numbers in it.
        let root_pages = pages_of(root_leaf(0, 0, &meta).len());
        let mut next = 3 + root_pages;
        let keys = Tree::new(&mut next, items.iter().map(|item| (item.key.len(), item.size)));
        let sizes = lease_rows.iter().map(|(key, value)| (key.len(), value.len()));
        let leases = Tree::new(&mut next, sizes);
        let root = root_leaf(keys.root, leases.root, &meta);
        Self { root, root_pages, keys, items, leases, lease_rows, pages: next }
    }

    pub fn size(&self) -> u64 {
        self.pages * PAGE as u64
    }

    /// `value` appends the value of an item.
    pub fn write(
        &self,
        out: &mut impl Write,
        value: &mut dyn FnMut(usize, &mut Vec<u8>),
    ) -> io::Result<()> {
        for id in 0..2 {
            out.write_all(&padded(meta_page(id, self.pages)))?;
        }
        out.write_all(&padded(header(2, FREE_LIST, 0, 0).to_vec()))?;
        let mut root = self.root.clone();
        root[..HEADER].copy_from_slice(&header(3, LEAF, table_count(), self.root_pages - 1));
        out.write_all(&padded(root))?;
        self.keys.write(out, &|i| &self.items[i].key, &|i| self.items[i].size, value)?;
        let rows = &self.lease_rows;
        let lease = &mut |i: usize, to: &mut Vec<u8>| to.extend_from_slice(&rows[i].1);
        self.leases.write(out, &|i| &rows[i].0, &|i| rows[i].1.len(), lease)
    }
}

impl Tree {
    /// `sizes` are those of keys and values.
    fn new(next: &mut u64, sizes: impl Iterator<Item = (usize, usize)> + Clone) -> Self {
        let leaves = spans(next, sizes.clone().map(|(key, value)| key + value));
        let mut tree = Self { leaves, branches: vec![], root: 0 };
        let keys: Vec<usize> = sizes.map(|(key, _)| key).collect();
        let mut first_keys: Vec<usize> =
            tree.leaves.iter().map(|span| keys.get(span.first).copied().unwrap_or(0)).collect();
        while first_keys.len() > 1 {
            let level = spans(next, first_keys.iter().copied());
            first_keys = level.iter().map(|span| first_keys[span.first]).collect();
            tree.branches.push(level);
        }
        let top = tree.branches.last().unwrap_or(&tree.leaves);
        tree.root = top.last().map_or(0, |span| span.page);
        tree
    }

    fn write<'a>(
        &self,
        out: &mut impl Write,
        key: &dyn Fn(usize) -> &'a Vec<u8>,
        size: &dyn Fn(usize) -> usize,
        value: &mut dyn FnMut(usize, &mut Vec<u8>),
    ) -> io::Result<()> {
        for span in &self.leaves {
            let range = span.first..span.first + span.count;
            let mut page = header(span.page, LEAF, span.count, span.pages - 1).to_vec();
            let mut offset = span.count * ELEMENT;
            for (at, i) in range.clone().enumerate() {
                element(&mut page, 0, offset - at * ELEMENT, key(i).len(), size(i));
                offset += key(i).len() + size(i);
            }
            for i in range {
                page.extend_from_slice(key(i));
                value(i, &mut page);
            }
            out.write_all(&padded(page))?;
        }
        let mut below: Vec<(usize, u64)> = self.leaves.iter().map(|s| (s.first, s.page)).collect();
        for level in &self.branches {
            for span in level {
                out.write_all(&padded(branch_page(span, &below, key)))?;
            }
            below = level.iter().map(|span| (below[span.first].0, span.page)).collect();
        }
        Ok(())
    }
}

/// `below` has the first item and the page of each span of the level below.
fn branch_page<'a>(
    span: &Span,
    below: &[(usize, u64)],
    key: &dyn Fn(usize) -> &'a Vec<u8>,
) -> Vec<u8> {
    let children = &below[span.first..span.first + span.count];
    let mut page = header(span.page, BRANCH, span.count, span.pages - 1).to_vec();
    let mut offset = span.count * ELEMENT;
    for (at, (first, child)) in children.iter().enumerate() {
        let size = key(*first).len();
        page.extend(((offset - at * ELEMENT) as u32).to_le_bytes());
        page.extend((size as u32).to_le_bytes());
        page.extend(child.to_le_bytes());
        offset += size;
    }
    for (first, _) in children {
        page.extend_from_slice(key(*first));
    }
    page
}

/// Distributes elements to pages, by their bytes besides the header; returns at least one page, which may
/// be empty.
fn spans(next: &mut u64, sizes: impl Iterator<Item = usize>) -> Vec<Span> {
    let mut spans: Vec<Span> = vec![];
    let (mut first, mut count, mut used) = (0, 0, HEADER);
    let mut close = |first: usize, count: usize, used: usize| {
        let pages = pages_of(used);
        spans.push(Span { page: *next, pages, first, count });
        *next += pages;
    };
    for size in sizes {
        let size = ELEMENT + size;
        if count > 0 && used + size > PAGE {
            close(first, count, used);
            (first, count, used) = (first + count, 0, HEADER);
        }
        count += 1;
        used += size;
    }
    close(first, count, used);
    spans
}

fn pages_of(bytes: usize) -> u64 {
    bytes.div_ceil(PAGE).max(1) as u64
}

fn padded(mut page: Vec<u8>) -> Vec<u8> {
    page.resize(pages_of(page.len()) as usize * PAGE, 0);
    page
}

fn header(id: u64, flags: u16, count: usize, overflow: u64) -> [u8; HEADER] {
    let mut out = [0; HEADER];
    out[..8].copy_from_slice(&id.to_le_bytes());
    out[8..10].copy_from_slice(&flags.to_le_bytes());
    // A page holds at most PAGE / ELEMENT elements, and its overflow one value.
    out[10..12].copy_from_slice(&(count as u16).to_le_bytes());
    out[12..].copy_from_slice(&(overflow as u32).to_le_bytes());
    out
}

fn element(page: &mut Vec<u8>, flags: u32, offset: usize, key: usize, value: usize) {
    page.extend(flags.to_le_bytes());
    for number in [offset, key, value] {
        page.extend((number as u32).to_le_bytes());
    }
}

fn meta_page(id: u64, pages: u64) -> Vec<u8> {
    let mut page = header(id, META, 0, 0).to_vec();
    for number in [MAGIC, VERSION, PAGE as u32, 0] {
        page.extend(number.to_le_bytes());
    }
    // Root, its sequence, free list, pages, transaction.
    for number in [3, 0, 2, pages, id] {
        page.extend(number.to_le_bytes());
    }
    let sum = fnv1a(&page[HEADER..]);
    page.extend(sum.to_le_bytes());
    page
}

pub fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

fn table_count() -> usize {
    EMPTY.len() + 3
}

/// The leaf with all tables; its own header is written later.
fn root_leaf(keys: u64, leases: u64, meta: &Rows) -> Vec<u8> {
    let table = |root: u64| [root.to_le_bytes(), 0_u64.to_le_bytes()].concat();
    let inside = |rows: &Rows| [table(0), leaf(rows, 0)].concat();
    let mut tables: Rows = EMPTY.map(|name| (name.into(), inside(&vec![]))).into();
    tables.push((b"key".to_vec(), table(keys)));
    tables.push((b"lease".to_vec(), table(leases)));
    tables.push((b"meta".to_vec(), inside(meta)));
    tables.sort_unstable();
    leaf(&tables, TABLE)
}

fn leaf(rows: &Rows, flags: u32) -> Vec<u8> {
    let mut page = header(0, LEAF, rows.len(), 0).to_vec();
    let mut offset = rows.len() * ELEMENT;
    for (at, (key, value)) in rows.iter().enumerate() {
        element(&mut page, flags, offset - at * ELEMENT, key.len(), value.len());
        offset += key.len() + value.len();
    }
    for (key, value) in rows {
        page.extend_from_slice(key);
        page.extend_from_slice(value);
    }
    page
}
