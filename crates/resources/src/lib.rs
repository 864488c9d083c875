//! The built-in resources: a row and a strategy each.
//!
//! In: nothing but types. Out: [`table`], from which routes, discovery, columns and storage keys
//! derive. A new kind is a file and a line in [`RESOURCES`].

mod apps;
mod core;
mod csr;
mod job;
mod parts;
mod print;
mod row;
mod rows;
mod scale;

pub use row::Row;

use apiserver::resource::ResourceTable;

/// All rows, by group; within a group in upstream's discovery order (by name).
const RESOURCES: &[&[fn() -> Row]] = &[core::ROWS, apps::ROWS, rows::ROWS];

/// The table of built-in resources. `schema` tells patches about lists and maps.
pub fn table(schema: Option<std::sync::Arc<dyn machinery::patch::Schema>>) -> ResourceTable {
    let rows = RESOURCES.iter().flat_map(|group| group.iter());
    ResourceTable::new(rows.map(|row| row().build(schema.clone())))
}

#[cfg(test)]
mod tests {
    #[test]
    fn every_row_is_complete() {
        let table = super::table(None);
        assert!(table.iter().count() > 50);
        for row in table.iter() {
            assert!(!row.plural.is_empty() && !row.kind.is_empty(), "{}", row.kind);
            assert_eq!(row.singular, row.kind.to_lowercase());
            let has = |verb| row.verbs.contains(&verb);
            assert_eq!(row.storage.is_some(), has("get"), "{}", row.plural);
        }
    }
}
