//! To come with the next commit.
