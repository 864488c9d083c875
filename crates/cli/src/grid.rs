//! Aligned columns like kubectl's.
//!
//! In: lines of cells. Out: text whose columns have the width of their widest cell plus three blanks, at
//! least six; a line's last cell is not padded. Widths are remembered, so that later lines of a watch are
//! aligned, too.
//!
//! Upstream: `tabwriter` with minwidth 6, padding 3 and RememberWidths.

const MIN_WIDTH: usize = 6;
const PADDING: usize = 3;

#[derive(Default)]
pub struct Grid {
    widths: Vec<usize>,
}

impl Grid {
    pub fn render(&mut self, lines: &[Vec<String>]) -> String {
        for line in lines {
            for (column, cell) in line.iter().enumerate().take(line.len().saturating_sub(1)) {
                if self.widths.len() <= column {
                    self.widths.push(MIN_WIDTH);
                }
                let width = &mut self.widths[column];
                *width = (*width).max(cell.chars().count() + PADDING);
            }
        }
        let mut out = String::new();
        for line in lines {
            for (column, cell) in line.iter().enumerate() {
                out.push_str(cell);
                if column + 1 < line.len() {
                    let blanks = self.widths[column] - cell.chars().count();
                    out.extend(std::iter::repeat_n(' ', blanks));
                }
            }
            out.push('\n');
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_kubectls() {
        let mut grid = Grid::default();
        let mut check = |lines: &[&[&str]], expected: &str| {
            let lines: Vec<Vec<String>> = lines
                .iter()
                .map(|line| line.iter().map(|cell| (*cell).to_owned()).collect())
                .collect();
            assert_eq!(grid.render(&lines), expected);
        };
        check(
            &[&["NAME", "A", "AGE"], &["web", "1/1", "5s"]],
            "NAME   A     AGE\nweb    1/1   5s\n",
        );
        check(&[&["a-long-name", "", "1d"]], "a-long-name         1d\n");
        check(&[&["x", "y", "z"]], "x             y     z\n");
    }
}
