//! Real containers (and a runtime made of paper), as root, in mount and network namespaces of the test's own. Without root each
//! test says so and passes.

mod containers;
mod hostile;
mod images;
mod remote;
mod restart;
mod security;
mod streams;
mod users;
mod volumes;
mod world;
