"""The problems of the task `functions`, in this repository's own words and unlike any prompt
that students are trained on (`research/distillation/prompts.py`)."""

# Of each: its signature, what it does, and tests, of which the model sees the first one. Easy and harder problems
# alternate, so that the first ones are like all of them. Arguments are values of JSON, results literals of Python.

PROBLEMS = r"""
def minutes_between(start: str, end: str) -> int
Both times are written "HH:MM" and belong to the same day; end is not before start. Return how many minutes lie between
them.
minutes_between("09:30", "10:15") == 45
minutes_between("00:00", "00:00") == 0
minutes_between("08:05", "08:06") == 1
minutes_between("11:59", "12:01") == 2
minutes_between("00:00", "23:59") == 1439

def seat_label(number: int, width: int) -> str
The seats of a cinema are numbered from 1, row after row, with width seats in each row. Return the row of a seat,
counted from 1, followed by its letter within the row, where A is the first.
seat_label(7, 4) == "2C"
seat_label(1, 4) == "1A"
seat_label(4, 4) == "1D"
seat_label(5, 4) == "2A"
seat_label(3, 1) == "3A"
seat_label(52, 26) == "2Z"

def split_bill(total: int, people: int) -> list[int]
Share a bill of total cents between people guests. No two shares may differ by more than one cent, and the larger
shares come first.
split_bill(10, 4) == [3, 3, 2, 2]
split_bill(9, 3) == [3, 3, 3]
split_bill(2, 3) == [1, 1, 0]
split_bill(0, 2) == [0, 0]
split_bill(7, 1) == [7]
split_bill(100, 7) == [15, 15, 14, 14, 14, 14, 14]

def shorten(text: str, limit: int) -> str
Return the text as it is if it has no more than limit characters. Otherwise return its beginning followed by three
dots, limit characters together. The limit is never below 3.
shorten("blackberry", 8) == "black..."
shorten("plum", 4) == "plum"
shorten("plums", 4) == "p..."
shorten("", 3) == ""
shorten("abcd", 3) == "..."

def longest_plateau(heights: list[int]) -> int
Return the length of the longest stretch of neighbouring entries that are equal; 0 for no entries.
longest_plateau([4, 4, 2, 2, 2, 7]) == 3
longest_plateau([]) == 0
longest_plateau([5]) == 1
longest_plateau([1, 2, 1, 2]) == 1
longest_plateau([3, 1, 6, 6]) == 2
longest_plateau([0, 0, 0, 0]) == 4

def free_slots(busy: list[list[int]], start: int, end: int) -> list[list[int]]
Each entry of busy is a meeting [from, to]. The meetings are in order, do not overlap, and lie within start and end.
Return the stretches of time between start and end without a meeting, as lists of the same form; none is empty.
free_slots([[9, 10], [12, 13]], 8, 17) == [[8, 9], [10, 12], [13, 17]]
free_slots([], 8, 12) == [[8, 12]]
free_slots([[8, 12]], 8, 12) == []
free_slots([[8, 9], [9, 10]], 8, 11) == [[10, 11]]
free_slots([[10, 12]], 8, 12) == [[8, 10]]

def cheapest(prices: dict[str, int]) -> str
Return the name of the item with the lowest price. Of several items at that price return the one whose name comes first
in the alphabet; without any item return an empty string.
cheapest({"tea": 3, "milk": 2, "rice": 5}) == "milk"
cheapest({"tea": 3, "milk": 3}) == "milk"
cheapest({"ink": 4, "pen": 1, "cap": 1}) == "cap"
cheapest({"zinc": -1, "iron": 0}) == "zinc"
cheapest({}) == ""

def staircase(steps: int) -> str
Draw a staircase: line number k, counted from 1, consists of k times the character "#". Separate the lines by a line
break, without one at the end.
staircase(3) == "#\n##\n###"
staircase(1) == "#"
staircase(2) == "#\n##"
staircase(0) == ""
staircase(5) == "#\n##\n###\n####\n#####"

def first_free_number(taken: list[int]) -> int
Return the smallest whole number above 0 that is not among those taken.
first_free_number([3, 1, 2, 6]) == 4
first_free_number([]) == 1
first_free_number([2, 3]) == 1
first_free_number([1, 1, 2, 2]) == 3
first_free_number([-4, 0, 1]) == 2
first_free_number([5, 4, 3, 2, 1]) == 6

def dial_steps(start: int, target: int, size: int) -> int
A dial has the positions 0 to size - 1 in a circle and can be turned either way, one position with each step. Return
the fewest steps from start to target.
dial_steps(8, 1, 10) == 3
dial_steps(4, 4, 10) == 0
dial_steps(0, 5, 10) == 5
dial_steps(1, 8, 10) == 3
dial_steps(2, 6, 12) == 4
dial_steps(0, 0, 1) == 0

def initials(name: str) -> str
Return the first letter of each part of a name as a capital, each followed by a full stop. The parts are separated by
one or more spaces.
initials("mary jane watson") == "M.J.W."
initials("Cher") == "C."
initials("  otto   hahn ") == "O.H."
initials("") == ""
initials("a B c D") == "A.B.C.D."

def seconds_in(text: str) -> int
The text names a length of time in hours, minutes and seconds, such as "2h 5m 10s". The parts stand in this order,
separated by spaces, and each of them may be absent. Return the length in seconds.
seconds_in("2h 5m 10s") == 7510
seconds_in("45s") == 45
seconds_in("3h") == 10800
seconds_in("1h 1s") == 3601
seconds_in("90m 90s") == 5490
seconds_in("") == 0

def shared_hours(first: list[int], second: list[int]) -> int
Two shifts are each given as [begin, end] in hours. Return for how many hours both are on duty.
shared_hours([8, 14], [12, 18]) == 2
shared_hours([8, 10], [10, 12]) == 0
shared_hours([1, 3], [7, 9]) == 0
shared_hours([6, 20], [9, 11]) == 2
shared_hours([13, 15], [5, 14]) == 1
shared_hours([4, 9], [4, 9]) == 5

def wave_case(text: str) -> str
Write the letters of a text alternately as capitals and as small letters, beginning with a capital. All other
characters stay as they are and do not count.
wave_case("go on, now") == "Go On, NoW"
wave_case("") == ""
wave_case("ABCD") == "AbCd"
wave_case("a1b2c3") == "A1b2C3"
wave_case("--x--y") == "--X--y"

def render_names(names: list[str]) -> str
Join names as in a sentence: with commas, but with the word and before the last one.
render_names(["Ann", "Bob", "Cid"]) == "Ann, Bob and Cid"
render_names(["Ann"]) == "Ann"
render_names(["Ann", "Bob"]) == "Ann and Bob"
render_names([]) == ""
render_names(["a", "b", "c", "d"]) == "a, b, c and d"

def places(scores: list[int]) -> list[int]
Return the place of each score, in the given order: 1 for the highest. Equal scores share a place, and the places after
them are left out.
places([50, 80, 80, 30]) == [3, 1, 1, 4]
places([]) == []
places([7]) == [1]
places([1, 2, 3]) == [3, 2, 1]
places([5, 5, 5]) == [1, 1, 1]
places([9, 4, 4, 4, 2]) == [1, 2, 2, 2, 5]

def tank_level(changes: list[int], capacity: int) -> int
A tank is empty at first. Each change adds so much water, or takes some away if it is negative. The tank never holds
less than nothing or more than its capacity; what is too much runs over. Return the level after the last change.
tank_level([5, 8, -3], 10) == 7
tank_level([], 10) == 0
tank_level([-4, 6], 10) == 6
tank_level([12, -12, 3], 10) == 3
tank_level([3, -9, 2, 20], 6) == 6
tank_level([4], 0) == 0

def border_sum(grid: list[list[int]]) -> int
Return the sum of the entries at the border of a grid: in its first or last row, or its first or last column. Every
entry counts once.
border_sum([[1, 2, 3], [4, 5, 6], [7, 8, 9]]) == 40
border_sum([[7]]) == 7
border_sum([[1, 2, 3]]) == 6
border_sum([[1], [2], [3]]) == 6
border_sum([[1, 1], [1, 1]]) == 4
border_sum([[1, 1, 1, 1], [1, 9, 9, 1], [1, 1, 1, 1]]) == 10

def swap_ends(text: str) -> str
Return the text with its first and its last character exchanged.
swap_ends("planet") == "tlanep"
swap_ends("ab") == "ba"
swap_ends("x") == "x"
swap_ends("") == ""
swap_ends("a-b") == "b-a"

def favourite_letter(text: str) -> str
Return the letter from a to z that a text has most often, as a small letter; capitals count as small letters. If
several letters are equally frequent, return the one that is first in the alphabet. Return an empty string if there is
none.
favourite_letter("Banana Bread!") == "a"
favourite_letter("") == ""
favourite_letter("1 2 2 2") == ""
favourite_letter("zZy Yx") == "y"
favourite_letter("Q q Q a a") == "q"
favourite_letter("cab") == "a"

def from_digits(digits: list[int], base: int) -> int
Return the number that has these digits in the given base, the most significant one first.
from_digits([1, 0, 2], 3) == 11
from_digits([], 10) == 0
from_digits([7], 8) == 7
from_digits([0, 0, 5], 10) == 5
from_digits([15, 15], 16) == 255
from_digits([1, 0, 0, 0], 2) == 8

def collapse_ranges(numbers: list[int]) -> str
The numbers are different and ascend. Write three or more that follow one another as "first-last", all others singly,
and separate all of this by commas.
collapse_ranges([1, 2, 3, 7, 9, 10]) == "1-3,7,9,10"
collapse_ranges([]) == ""
collapse_ranges([4]) == "4"
collapse_ranges([4, 5]) == "4,5"
collapse_ranges([2, 3, 4, 5]) == "2-5"
collapse_ranges([1, 3, 4, 5, 8, 9, 10]) == "1,3-5,8-10"

def heading(slug: str) -> str
A slug has small words that are joined by hyphens. Return the words separated by spaces, each with a capital first
letter.
heading("the-old-mill") == "The Old Mill"
heading("harbour") == "Harbour"
heading("a-b-c") == "A B C"
heading("") == ""
heading("route-66") == "Route 66"

def lift_travel(floors: list[int]) -> int
A lift starts at floor 0 and stops at the given floors in this order. Return how many floors it travels altogether,
upwards and downwards.
lift_travel([3, 1, 5]) == 9
lift_travel([]) == 0
lift_travel([0]) == 0
lift_travel([-2, 2]) == 6
lift_travel([4, 4, 4]) == 4
lift_travel([10, 0]) == 20

def pay_with(amount: int, coins: list[int]) -> list[int]
Pay an amount by always taking the largest coin that is not more than what is left, as often as needed. The kinds of
coins stand in any order, and 1 is among them. Return the coins in the order in which they are taken.
pay_with(18, [1, 5, 10]) == [10, 5, 1, 1, 1]
pay_with(0, [1, 2]) == []
pay_with(3, [1]) == [1, 1, 1]
pay_with(6, [4, 3, 1]) == [4, 1, 1]
pay_with(40, [1, 20, 5]) == [20, 20]
pay_with(9, [1, 10, 9]) == [9]

def walk(moves: str) -> list[int]
A robot starts at [0, 0] and takes a step for each letter: N adds 1 to the second number, S takes 1 from it, E adds 1
to the first number, W takes 1 from it. Other letters mean no step. Return the position at the end.
walk("NNE") == [1, 2]
walk("") == [0, 0]
walk("NSEW") == [0, 0]
walk("WWS") == [-2, -1]
walk("NxE?") == [1, 1]

def table_lines(rows: list[list[str]]) -> list[str]
All rows have equally many cells. Fill up each cell with spaces at its right until it is as wide as the widest cell of
its column, and return each row with " | " between its cells.
table_lines([["id", "name"], ["7", "Eve"]]) == ["id | name", "7  | Eve "]
table_lines([]) == []
table_lines([["a"]]) == ["a"]
table_lines([["a"], ["bcd"]]) == ["a  ", "bcd"]
table_lines([["", "x", "yy"], ["zz", "", "y"]]) == ["   | x | yy", "zz |   | y "]

def bars(counts: dict[str, int]) -> list[str]
Return a line for each entry, in the given order: its name, a colon, a space, and as many asterisks as its count says.
bars({"cat": 3, "dog": 1}) == ["cat: ***", "dog: *"]
bars({}) == []
bars({"x": 0}) == ["x: "]
bars({"b": 2, "a": 2}) == ["b: **", "a: **"]
bars({"long name": 5}) == ["long name: *****"]

def peaks(heights: list[int]) -> list[int]
Return the indexes of all entries that are larger than both of their neighbours. The first and the last entry have only
one neighbour and never count.
peaks([1, 4, 2, 2, 5, 3]) == [1, 4]
peaks([]) == []
peaks([9]) == []
peaks([3, 1, 3]) == []
peaks([1, 5, 5, 1]) == []
peaks([0, 1, 0, 1, 0]) == [1, 3]

def wrap_words(text: str, width: int) -> list[str]
Break a text into lines: each line takes as many whole words as fit into width characters, with one space between two
words. A word that is too long by itself gets a line alone.
wrap_words("the cat sat on a mat", 7) == ["the cat", "sat on", "a mat"]
wrap_words("", 5) == []
wrap_words("one", 3) == ["one"]
wrap_words("a bb ccc", 4) == ["a bb", "ccc"]
wrap_words("hi wonderful me", 4) == ["hi", "wonderful", "me"]
wrap_words("a b c d", 3) == ["a b", "c d"]

def blocks(text: str, size: int) -> list[str]
Cut a text into parts of size characters; the last part may be shorter.
blocks("abcdefg", 3) == ["abc", "def", "g"]
blocks("", 4) == []
blocks("abcd", 2) == ["ab", "cd"]
blocks("abc", 10) == ["abc"]
blocks("a b", 1) == ["a", " ", "b"]

def leap_years(first: int, last: int) -> int
Count the leap years from first to last, both included. Years that 4 divides are leap years, but not those that 100
divides unless 400 divides them too.
leap_years(1999, 2005) == 2
leap_years(2001, 2003) == 0
leap_years(1900, 1900) == 0
leap_years(2000, 2000) == 1
leap_years(1896, 1904) == 2
leap_years(1600, 2000) == 98

def weekday_after(day: str, days: int) -> str
The days of the week are called Mon, Tue, Wed, Thu, Fri, Sat and Sun. Return the name of the day that lies the given
number of days later, or earlier if the number is negative.
weekday_after("Fri", 4) == "Tue"
weekday_after("Mon", 0) == "Mon"
weekday_after("Mon", -1) == "Sun"
weekday_after("Sun", 1) == "Mon"
weekday_after("Wed", 700) == "Wed"
weekday_after("Thu", -10) == "Mon"

def twelve_hour(time: str) -> str
Rewrite a time from "HH:MM" on a clock of 24 hours to one of 12 hours, with am or pm and without a zero in front of the
hour. Midnight and noon are at 12.
twelve_hour("15:05") == "3:05 pm"
twelve_hour("00:30") == "12:30 am"
twelve_hour("12:00") == "12:00 pm"
twelve_hour("09:07") == "9:07 am"
twelve_hour("23:59") == "11:59 pm"
twelve_hour("11:11") == "11:11 am"

def till_balance(lines: list[str]) -> int
Each line is "in" or "out", a space, and an amount. Return what is in the till at the end if it was empty at first.
till_balance(["in 50", "out 20", "in 5"]) == 35
till_balance([]) == 0
till_balance(["out 3"]) == -3
till_balance(["in 0", "in 12"]) == 12
till_balance(["in 100", "out 100"]) == 0

def day_reached(steps: list[int], goal: int) -> int
Return the number of the day, counted from 1, on which the steps of all days so far reach the goal for the first time,
or 0 if they never do. The goal is at least 1.
day_reached([400, 300, 500], 700) == 2
day_reached([], 5) == 0
day_reached([10], 10) == 1
day_reached([1, 2, 3], 7) == 0
day_reached([0, 0, 4], 1) == 3
day_reached([5, 5, 5, 5], 20) == 4

def common_guests(first: list[str], second: list[str]) -> list[str]
Return the names that stand in both guest lists, in the order of the first one. No name is returned twice.
common_guests(["Uma", "Ali", "Eli"], ["Eli", "Uma"]) == ["Uma", "Eli"]
common_guests([], ["Ali"]) == []
common_guests(["Ali"], []) == []
common_guests(["Ali", "Bo", "Ali"], ["Ali"]) == ["Ali"]
common_guests(["ali"], ["Ali"]) == []
common_guests(["d", "c", "b"], ["b", "c", "d"]) == ["d", "c", "b"]

def by_topic(books: dict[str, list[str]]) -> dict[str, list[str]]
The argument has a list of topics for each title of a book. Return for each topic its titles in alphabetical order.
by_topic({"Sea": ["fish", "ships"], "Port": ["ships"]}) == {"fish": ["Sea"], "ships": ["Port", "Sea"]}
by_topic({}) == {}
by_topic({"Blank": []}) == {}
by_topic({"B": ["x"], "A": ["x"], "C": ["x"]}) == {"x": ["A", "B", "C"]}
by_topic({"A": ["p", "q"]}) == {"p": ["A"], "q": ["A"]}

def nearest_shelf(shelves: list[int], place: int) -> int
Return the shelf number that is closest to a place; if two are equally close, the smaller one. There is at least one
shelf, and they stand in any order.
nearest_shelf([12, 3, 8], 7) == 8
nearest_shelf([4], 100) == 4
nearest_shelf([9, 5], 7) == 5
nearest_shelf([5, 9], 7) == 5
nearest_shelf([-3, 2], -1) == -3
nearest_shelf([1, 2, 3], 3) == 3

def mask_digits(text: str, shown: int) -> str
Replace the digits of a text by asterisks, except for the last few: as many as shown says. All other characters stay.
mask_digits("1234-5678", 4) == "****-5678"
mask_digits("", 2) == ""
mask_digits("12", 5) == "12"
mask_digits("a1b2c3", 1) == "a*b*c3"
mask_digits("77", 0) == "**"
mask_digits("5 of 6", 1) == "* of 6"
mask_digits("1-2-3", 2) == "*-2-3"

def expand_ranges(text: str) -> list[int]
The text has numbers and ranges such as 4-6, separated by commas. Return all numbers that it means, in its order; a
range includes both of its ends.
expand_ranges("1-3,7") == [1, 2, 3, 7]
expand_ranges("") == []
expand_ranges("5") == [5]
expand_ranges("9,2-2") == [9, 2]
expand_ranges("10-12,1,3-4") == [10, 11, 12, 1, 3, 4]

def knight_moves(column: int, row: int) -> int
A knight of chess moves by two squares along one axis and by one along the other. Return how many squares of an 8 by 8
board it can reach in one move; columns and rows are numbered from 1 to 8.
knight_moves(1, 1) == 2
knight_moves(4, 4) == 8
knight_moves(8, 8) == 2
knight_moves(2, 1) == 3
knight_moves(1, 4) == 4
knight_moves(7, 6) == 6

def lamps_on(count: int, presses: list[int]) -> list[int]
Lamps 1 to count are off at first. Each press of a lamp's number switches this lamp on if it is off, and off if it is
on; a number without a lamp does nothing. Return the numbers of the lamps that are on at the end, ascending.
lamps_on(5, [2, 4, 2, 1]) == [1, 4]
lamps_on(3, []) == []
lamps_on(0, [1]) == []
lamps_on(2, [2, 1]) == [1, 2]
lamps_on(3, [3, 3, 3]) == [3]
lamps_on(2, [0, 3, -1]) == []

def is_older(first: str, second: str) -> bool
Both arguments are versions: numbers joined by full stops. Say whether the first version is older than the second one.
Parts are compared as numbers from the left, and a missing part counts as 0.
is_older("1.9", "1.10") == True
is_older("2.0", "1.9") == False
is_older("1.0", "1") == False
is_older("1", "1.0") == False
is_older("1", "1.0.1") == True
is_older("3.2.1", "3.2.1") == False
is_older("0.9.9", "1") == True

def is_magic(grid: list[list[int]]) -> bool
Say whether a square grid is magic: all rows, all columns and both diagonals have the same sum.
is_magic([[2, 7, 6], [9, 5, 1], [4, 3, 8]]) == True
is_magic([[5]]) == True
is_magic([[1, 2], [3, 4]]) == False
is_magic([[1, 1], [1, 1]]) == True
is_magic([[1, 2, 3], [3, 1, 2], [2, 3, 1]]) == False
is_magic([[1, 1, 1], [2, 2, 2], [3, 3, 3]]) == False

def word_lengths(text: str) -> dict[int, int]
Spaces separate the words. Return how many words of each length there are.
word_lengths("to be or not") == {2: 3, 3: 1}
word_lengths("") == {}
word_lengths("one") == {3: 1}
word_lengths("a  b") == {1: 2}
word_lengths("it is a test case") == {2: 2, 1: 1, 4: 2}

def rounds_needed(players: int) -> int
In each round of a tournament players meet in pairs, the loser of each pair leaves, and a player without a partner
stays. Return the number of rounds until one player is left.
rounds_needed(5) == 3
rounds_needed(1) == 0
rounds_needed(2) == 1
rounds_needed(8) == 3
rounds_needed(9) == 4
rounds_needed(1000) == 10

def round_to_step(value: int, step: int) -> int
Round a number, which is not negative, to the nearest multiple of step; exactly between two multiples round up.
round_to_step(17, 5) == 15
round_to_step(18, 5) == 20
round_to_step(15, 10) == 20
round_to_step(25, 10) == 30
round_to_step(0, 7) == 0
round_to_step(3, 8) == 0
round_to_step(9, 1) == 9

def tiles_needed(length: int, width: int, tile: int) -> int
A floor is covered by square tiles with sides of the given size. Tiles may be cut, but what was cut off is not used.
Return how many tiles are needed.
tiles_needed(5, 3, 2) == 6
tiles_needed(4, 4, 2) == 4
tiles_needed(1, 1, 9) == 1
tiles_needed(10, 1, 3) == 4
tiles_needed(0, 5, 2) == 0

def jury_sum(scores: list[int]) -> int
Leave out one highest and one lowest score and return the sum of the others; 0 if there are fewer than three scores.
jury_sum([7, 9, 4, 8]) == 15
jury_sum([]) == 0
jury_sum([5, 9]) == 0
jury_sum([6, 6, 6]) == 6
jury_sum([1, 1, 9, 9, 5]) == 15
jury_sum([-2, 0, 3]) == 0

def folder_depth(steps: list[str]) -> int
Begin in the top folder, at depth 0. The step ".." leads one folder up, but never above the top, "." stays in the
folder, and any other name leads into a folder. Return the depth at the end.
folder_depth(["music", "old", ".."]) == 1
folder_depth([]) == 0
folder_depth(["..", "..", "a"]) == 1
folder_depth([".", "a", ".", "b"]) == 2
folder_depth(["...", "x"]) == 2
folder_depth(["a", "..", "..", "b", "c"]) == 2

def change_due(coins: list[int], price: int) -> int
Return what a customer gets back who pays a price with these coins, or -1 if they are not enough.
change_due([50, 20], 65) == 5
change_due([], 0) == 0
change_due([], 1) == -1
change_due([10, 10], 20) == 0
change_due([5, 2], 8) == -1

def weave(first: str, second: str) -> str
Take characters alternately from two texts, beginning with the first one. When one text has no more, append what is
left of the other.
weave("ace", "bd") == "abcde"
weave("", "") == ""
weave("", "xyz") == "xyz"
weave("xyz", "") == "xyz"
weave("a", "bcd") == "abcd"
weave("1234", "ab") == "1a2b34"

def mines_around(field: list[list[int]], row: int, column: int) -> int
In a field 1 means a mine. Return the number of mines on the up to eight squares around a square, diagonally too; rows
and columns are counted from 0, and the square itself does not count.
mines_around([[1, 0, 1], [0, 1, 0], [0, 0, 1]], 1, 1) == 3
mines_around([[1]], 0, 0) == 0
mines_around([[0, 1], [1, 1]], 0, 0) == 3
mines_around([[1, 1, 1], [1, 1, 1], [1, 1, 1]], 1, 1) == 8
mines_around([[1, 1, 1], [1, 1, 1], [1, 1, 1]], 2, 1) == 5
mines_around([[0, 0, 1], [0, 0, 0]], 1, 0) == 0

def fold_strip(values: list[int]) -> list[int]
Fold a strip of numbers in the middle: add the first and the last one, the second and the last but one, and so on. If
there is one in the middle, it stays by itself at the end.
fold_strip([1, 2, 3, 4, 5]) == [6, 6, 3]
fold_strip([]) == []
fold_strip([8]) == [8]
fold_strip([1, 10]) == [11]
fold_strip([1, 2, 3, 40]) == [41, 5]
fold_strip([-1, 0, 1]) == [0, 0]

def check_digit(code: str) -> int
Multiply the digits of a code alternately by 1 and by 3, beginning with 1 at the left, and add up. Return the number
that must be added to reach a multiple of 10: 0 to 9.
check_digit("4006") == 8
check_digit("0") == 0
check_digit("7") == 3
check_digit("13") == 0
check_digit("9999") == 8
check_digit("123456") == 5

def is_chain(words: list[str]) -> bool
Say whether each word, except for the first, begins with the letter that ends the word before it. No word is empty, all
letters are small, and fewer than two words are a chain.
is_chain(["sun", "night", "tree"]) == True
is_chain([]) == True
is_chain(["moon"]) == True
is_chain(["ab", "cb"]) == False
is_chain(["ab", "bc", "bd"]) == False
is_chain(["aa", "ab", "ba", "ac"]) == True

def closing_time(customers: list[int], desks: int) -> int
Each number is the minutes that a customer needs. At minute 0 all desks are free; in the given order each customer goes
to the desk that is free first. Return the minute at which the last customer is done.
closing_time([5, 2, 3, 4], 2) == 9
closing_time([], 3) == 0
closing_time([7], 2) == 7
closing_time([1, 2, 3], 1) == 6
closing_time([2, 10, 3, 3], 2) == 10
closing_time([4, 4, 4], 5) == 4

def stock_after(stock: dict[str, int], sales: list[str]) -> dict[str, int]
The stock says how many pieces of each item there are, at least one. Each sale takes one piece of an item, and an item
that has none left disappears. A sale of what is not there changes nothing. Return the stock after all sales.
stock_after({"pen": 2, "cup": 1}, ["pen", "cup"]) == {"pen": 1}
stock_after({}, ["pen"]) == {}
stock_after({"pen": 1}, []) == {"pen": 1}
stock_after({"pen": 1}, ["pen", "pen"]) == {}
stock_after({"a": 3, "b": 1}, ["b", "a", "a", "c"]) == {"a": 1}

def spell_digits(number: int) -> str
Write each digit of a number, which is not negative, as an English word, and separate the words by spaces.
spell_digits(305) == "three zero five"
spell_digits(0) == "zero"
spell_digits(77) == "seven seven"
spell_digits(9) == "nine"
spell_digits(1248) == "one two four eight"
spell_digits(60) == "six zero"
"""
