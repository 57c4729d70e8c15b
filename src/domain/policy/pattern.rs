//! Patterns over error text.

use std::fmt;

use super::PolicyError;

/// A pattern over the text of an error, blind to case: with a `*` it is a glob over the whole text (`*` stands for
/// anything, also nothing, also line ends), without one it is a substring. No other character is special.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ErrorPattern {
    /// The literal pieces between the stars, folded.
    pieces: Vec<String>,
}

/// The pattern as it was written, case apart.
impl fmt::Display for ErrorPattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.pieces.join("*"))
    }
}

impl ErrorPattern {
    /// Reads a pattern. An empty one is refused: it would match every error, which is what `*` is for.
    pub fn parse(pattern: &str) -> Result<Self, PolicyError> {
        if pattern.trim().is_empty() {
            return Err(PolicyError::line("an error pattern must not be empty"));
        }
        let pieces = fold(pattern).split('*').map(str::to_owned).collect();
        Ok(Self { pieces })
    }

    /// Whether the pattern matches a text that [`fold`] has folded.
    pub(crate) fn matches_folded(&self, folded: &str) -> bool {
        match self.pieces.as_slice() {
            [] => false,
            [piece] => folded.contains(piece.as_str()),
            [head, middle @ .., tail] => {
                let Some(mut rest) = folded.strip_prefix(head.as_str()) else {
                    return false;
                };
                // The leftmost place of each piece leaves the most room for the ones after it: no backtracking.
                for piece in middle {
                    let Some((_, after)) = rest.split_once(piece.as_str()) else {
                        return false;
                    };
                    rest = after;
                }
                rest.ends_with(tail.as_str())
            }
        }
    }
}

/// Lower case, letter by letter: `str::to_lowercase` looks at a letter's neighbours (Greek sigma), so a pattern and
/// the text around its match could come out different.
pub(crate) fn fold(text: &str) -> String {
    text.chars().flat_map(char::to_lowercase).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn matches(pattern: &str, text: &str) -> bool {
        ErrorPattern::parse(pattern)
            .unwrap()
            .matches_folded(&fold(text))
    }

    #[test]
    fn without_a_star_a_pattern_is_a_substring_blind_to_case() {
        assert!(matches("timeout", "Connection Timeout after 5 s"));
        assert!(matches("RAČUN", "neispravan račun"));
        assert!(matches("ΟΔΟΣ", "οδοσ 12"));
        assert!(!matches("timeout", "time out"));
        assert!(matches("[a-z]?", "literally [a-z]?"));
    }

    #[test]
    fn with_a_star_a_pattern_covers_the_whole_text() {
        assert!(matches("http 4*", "HTTP 404 not found"));
        assert!(!matches("http 4*", "got HTTP 404"));
        assert!(matches("*refused", "dial tcp:\nconnection refused"));
        assert!(!matches("*refused", "connection refused, giving up"));
        assert!(matches("*kv*timeout*", "the KV store: timeout"));
        assert!(!matches("*timeout*kv*", "the KV store: timeout"));
        assert!(matches("*", ""));
    }

    #[test]
    fn head_and_tail_do_not_share_letters() {
        assert!(!matches("aba*aba", "aba"));
        assert!(!matches("ab*b*b", "abb"));
        assert!(matches("ab*b*b", "abbb"));
    }

    #[test]
    fn an_empty_pattern_is_refused() {
        for empty in ["", "  "] {
            assert!(ErrorPattern::parse(empty).is_err());
        }
    }

    proptest! {
        #[test]
        fn any_text_is_found_by_itself_and_inside_stars(text in "[^*]*[^*\\s][^*]*", before: String, after: String) {
            let around = [before.as_str(), &text, &after].concat();
            let (inside, ahead) = (["*", &text, "*"].concat(), [&text, "*"].concat());
            prop_assert!(matches(&text, &around));
            prop_assert!(matches(&inside, &around));
            prop_assert!(matches(&ahead, &[text, after].concat()));
        }

        #[test]
        fn a_glob_agrees_with_the_obvious_matcher(pattern in "[ab]{0,3}\\*[ab*]{0,5}", text in "[ab]{0,10}") {
            fn obvious(pattern: &[u8], text: &[u8]) -> bool {
                match pattern {
                    [] => text.is_empty(),
                    [b'*', rest @ ..] => (0..=text.len()).any(|at| obvious(rest, &text[at..])),
                    [letter, rest @ ..] => text.first() == Some(letter) && obvious(rest, &text[1..]),
                }
            }
            prop_assert_eq!(matches(&pattern, &text), obvious(pattern.as_bytes(), text.as_bytes()));
        }
    }
}
