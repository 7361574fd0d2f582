// Lookup drafts: what followed the last tokens of a text where they stood before, in this text or another.
#pragma once
#include <algorithm>
#include <cstdint>

constexpr int64_t MIN_LOOKUP_MATCH = 2;   // fewer tokens in common say nothing
constexpr int64_t MAX_LOOKUP_MATCH = 16;  // longer ones are as good

struct Lookup {
    int64_t length = 0;               // tokens in common; 0: none found
    const int64_t* next = nullptr;    // what followed them
    const int64_t* stop = nullptr;    // the end of that text
};

// The longest match of the end of `text` in [from, from + count), the latest of equally long ones. Tokens of the match
// and one behind it lie in that span. A scan takes a microsecond for a thousand tokens, so there is no index.
inline void find_match(const int64_t* text, int64_t length, const int64_t* from, int64_t count, Lookup& best) {
    const int64_t last = text[length - 1];
    for (int64_t end = count - 2; end >= 0; end--) {
        if (from[end] != last) continue;
        const int64_t most = std::min({MAX_LOOKUP_MATCH, end + 1, length});
        int64_t same = 1;
        while (same < most && from[end - same] == text[length - 1 - same]) same++;
        if (same < MIN_LOOKUP_MATCH || same <= best.length) continue;
        best = {same, from + end + 1, from + count};
        if (same == MAX_LOOKUP_MATCH) return;
    }
}

// Copies what followed a match, `most` tokens at most; returns how many. A match in the same text that overlaps its end
// goes on with what it has copied: the text repeats itself.
inline int64_t copy_continuation(const Lookup& found, bool is_own_text, int64_t most, int64_t* to) {
    const int64_t there = found.stop - found.next;
    const int64_t count = is_own_text ? most : std::min(most, there);
    for (int64_t nth = 0; nth < count; nth++) to[nth] = nth < there ? found.next[nth] : to[nth - there];
    return count;
}
