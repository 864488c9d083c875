//! Protobuf messages, written as in their `.proto` file.
//!
//! In: messages and enumerations with their field numbers. Out: structs and enums with prost's derives,
//! which the crate that uses the macro depends on.
//!
//! ```text
//! base::messages! {
//!     enum Health { Unknown = 0; Good = 1; }
//!     oneof Answer { Device found = 1; }
//!
//!     message Device {
//!         string name = 1;
//!         optional int64 size = 2;
//!         repeated string links = 3;
//!         map<string, string> labels = 4;
//!         Device parent = 5;
//!         enum Health health = 6;
//!     }
//! }
//! ```
//!
//! A field of a message type is an `Option`, an enumeration an `i32`, `bytes` are `Bytes` and `buffer` is
//! the same as a `Vec<u8>`. Unknown fields are skipped.

/// See [the module](crate::messages).
#[macro_export]
macro_rules! messages {
    ($($(#[$attr:meta])* $kind:ident $name:ident { $($body:tt)* })*) => {
        $($crate::messages!(@$kind [$(#[$attr])* $name] $($body)*);)*
    };
    (@enum [$(#[$attr:meta])* $name:ident] $($value:ident = $number:literal;)*) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, ::prost::Enumeration)]
        $(#[$attr])*
        #[repr(i32)]
        pub enum $name { $($value = $number,)* }
    };
    (@oneof [$(#[$attr:meta])* $name:ident] $($kind:ident $value:ident = $tag:tt;)*) => {
        #[derive(Clone, PartialEq, ::prost::Oneof)]
        $(#[$attr])*
        pub enum $name { $(#[prost(message, tag($tag))] $value($kind),)* }
    };
    (@message $head:tt $($body:tt)*) => { $crate::messages!(@next $head [] $($body)*); };

    // The next field: its documentation, how often it occurs, its type.
    (@next [$(#[$attr:meta])* $name:ident] [$($fields:tt)*]) => {
        #[derive(Clone, PartialEq, ::prost::Message)]
        $(#[$attr])*
        pub struct $name { $($fields)* }
    };
    (@next $head:tt $fields:tt $(#[$doc:meta])* $first:ident $($rest:tt)*) => {
        $crate::messages!(@count $head $fields [$(#[$doc])*] $first $($rest)*);
    };
    (@count $head:tt $fields:tt $doc:tt repeated $($rest:tt)*) => {
        $crate::messages!(@type $head $fields $doc repeated $($rest)*);
    };
    (@count $head:tt $fields:tt $doc:tt optional $($rest:tt)*) => {
        $crate::messages!(@type $head $fields $doc optional $($rest)*);
    };
    (@count $head:tt $fields:tt $doc:tt oneof($($tags:tt)*) $kind:ident $field:ident; $($rest:tt)*) => {
        $crate::messages!(@put $head $fields $doc
            [oneof($kind), tags($($tags)*)] [Option<$kind>] $field $($rest)*);
    };
    (@count $head:tt $fields:tt $doc:tt map<string, string> $($rest:tt)*) => {
        $crate::messages!(@field $head $fields $doc [btree_map(string, string)]
            [std::collections::BTreeMap<String, String>] $($rest)*);
    };
    (@count $head:tt $fields:tt $doc:tt map<string, buffer> $($rest:tt)*) => {
        $crate::messages!(@field $head $fields $doc [btree_map(string, bytes)]
            [std::collections::BTreeMap<String, Vec<u8>>] $($rest)*);
    };
    (@count $head:tt $fields:tt $doc:tt map<string, $kind:ident> $($rest:tt)*) => {
        $crate::messages!(@field $head $fields $doc [btree_map(string, message)]
            [std::collections::BTreeMap<String, $kind>] $($rest)*);
    };
    (@count $head:tt $fields:tt $doc:tt $($rest:tt)*) => {
        $crate::messages!(@type $head $fields $doc one $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt $count:ident string $($rest:tt)*) => {
        $crate::messages!(@$count $head $fields $doc [string] [String] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt $count:ident bytes $($rest:tt)*) => {
        $crate::messages!(@$count $head $fields $doc [bytes = "bytes"] [::bytes::Bytes] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt $count:ident buffer $($rest:tt)*) => {
        $crate::messages!(@$count $head $fields $doc [bytes = "vec"] [Vec<u8>] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt $count:ident bool $($rest:tt)*) => {
        $crate::messages!(@$count $head $fields $doc [bool] [bool] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt $count:ident int32 $($rest:tt)*) => {
        $crate::messages!(@$count $head $fields $doc [int32] [i32] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt $count:ident int64 $($rest:tt)*) => {
        $crate::messages!(@$count $head $fields $doc [int64] [i64] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt $count:ident uint32 $($rest:tt)*) => {
        $crate::messages!(@$count $head $fields $doc [uint32] [u32] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt $count:ident uint64 $($rest:tt)*) => {
        $crate::messages!(@$count $head $fields $doc [uint64] [u64] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt $count:ident double $($rest:tt)*) => {
        $crate::messages!(@$count $head $fields $doc [double] [f64] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt $count:ident enum $kind:ident $($rest:tt)*) => {
        $crate::messages!(@$count $head $fields $doc [enumeration($kind)] [i32] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt repeated $kind:ident $($rest:tt)*) => {
        $crate::messages!(@repeated $head $fields $doc [message] [$kind] $($rest)*);
    };
    (@type $head:tt $fields:tt $doc:tt one $kind:ident $($rest:tt)*) => {
        $crate::messages!(@optional $head $fields $doc [message] [$kind] $($rest)*);
    };
    (@one $head:tt $fields:tt $doc:tt $attr:tt $type:tt $($rest:tt)*) => {
        $crate::messages!(@field $head $fields $doc $attr $type $($rest)*);
    };
    (@repeated $head:tt $fields:tt $doc:tt [$($attr:tt)*] [$($type:tt)*] $($rest:tt)*) => {
        $crate::messages!(@field $head $fields $doc
            [$($attr)*, repeated] [Vec<$($type)*>] $($rest)*);
    };
    (@optional $head:tt $fields:tt $doc:tt [$($attr:tt)*] [$($type:tt)*] $($rest:tt)*) => {
        $crate::messages!(@field $head $fields $doc
            [$($attr)*, optional] [Option<$($type)*>] $($rest)*);
    };
    (@field $head:tt $fields:tt $doc:tt [$($attr:tt)*] $type:tt $field:ident = $tag:tt; $($rest:tt)*) => {
        $crate::messages!(@put $head $fields $doc [$($attr)*, tag($tag)] $type $field $($rest)*);
    };
    (@put $head:tt [$($fields:tt)*] [$($doc:tt)*] [$($attr:tt)*] [$($type:tt)*] $field:ident $($rest:tt)*) => {
        $crate::messages!(@next $head
            [$($fields)* $($doc)* #[prost($($attr)*)] pub $field: $($type)*,] $($rest)*);
    };
}
