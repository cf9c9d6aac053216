"""Two short texts of our own, for when none is given: one to calibrate on, another to measure on."""

from __future__ import annotations

__all__ = ["CALIBRATION", "EVALUATION"]

CALIBRATION = """\
The harbour town wakes before the sun. Boats that left at midnight come back in a line, their lamps still lit, and the
women of the market wait on the quay with baskets and sharp knives. By six the first crates of mackerel are packed in
ice; by seven the trucks have gone. What is left is sold to whoever gets up early, and the prices fall as the light
grows. "Two for the price of one," old Marit shouts, "and the one was cheap already!" Nobody believes her, and everybody
buys.

A bicycle stays upright because its front wheel steers into a fall. When the frame leans to the left, the wheel turns to
the left, the path of the wheels curves, and the machine is brought back under the rider. Spinning wheels help a little,
the trail of the fork helps more, and neither is needed: engineers have built bicycles without both that ride themselves
down a gentle slope. The mathematics takes two pages; the knack takes an afternoon and a scraped knee.

Question: A train leaves at 14:20 and travels 180 kilometres at 72 kilometres per hour. When does it arrive?
Answer: 180 / 72 = 2.5 hours, which is two hours and thirty minutes. The train arrives at 16:50.

def median(values):
    ordered = sorted(values)
    middle = len(ordered) // 2
    if len(ordered) % 2:
        return ordered[middle]
    return (ordered[middle - 1] + ordered[middle]) / 2

To make a simple bread, mix 500 g of flour with 350 ml of water, 10 g of salt and 3 g of dry yeast. Cover the bowl and
leave it overnight. In the morning, fold the dough four times, shape it, and let it rest for an hour. Bake it in a hot
pot: 30 minutes with the lid on, 15 minutes without. Wait until it is cool before you cut it, if you can.

In 1854 a physician drew a map of a single district and marked every death from cholera with a short black bar. The bars
crowded around one pump. He could not say what was in the water, and many of his colleagues held that the disease rose
from bad air; but the handle of the pump was taken off, and the map has been printed in books ever since. It is less
often told that the outbreak was already fading, or that he had gone from door to door for the numbers.

User: My plant has yellow leaves. What should I do?
Assistant: Yellow leaves most often mean too much water. Feel the soil: if it is wet a finger deep, let it dry
before you water again, and see that the pot drains. If the soil is dry and the lower leaves are yellow, it may lack
nitrogen; a weak fertiliser every two weeks in spring will help. Tell me which plant it is and how much light it
gets.

The committee met on Tuesday and agreed on three points. First, the old bridge will be repaired rather than replaced,
since the piers are sound. Second, heavy vehicles will take the northern road until the work is done. Third, the cost is
to be shared: forty percent by the county, the rest by the two parishes in proportion to their population. Mrs. Albright
asked that her objection to the third point be recorded.

{"name": "sensor-17", "unit": "celsius", "readings": [18.4, 18.6, 19.1, 18.9], "ok": true, "note": null}

Stars do not twinkle; the air does. Light from a distant star arrives as a thin parallel beam, and small pockets of
warm and cold air bend it this way and that, dozens of times a second. A planet is near enough to be a tiny disc
rather than a point, so the wobbles of its many rays average out, and it shines with a steady light. From above the
atmosphere, the whole sky is as still as a photograph.

Es war einmal ein kleines Haus am Rand des Waldes. Il pleuvait depuis trois jours, et personne ne savait pourquoi. La
puerta estaba abierta, pero nadie quiso entrar.

SELECT city, COUNT(*) AS orders, SUM(total) AS revenue FROM orders WHERE placed_at >= '2021-01-01' GROUP BY city
ORDER BY revenue DESC LIMIT 10;

She had written the letter four times. The first was angry, the second was kind and untrue, the third was so short
that it frightened her. The fourth lay on the table, and she read it again while the coffee grew cold: it said that
she would come in June, that she would stay for a week, and that there were things they did not have to speak about.
She folded it, looked for a stamp, and found only the ones with the heron on them, which had been his favourite.
"""

EVALUATION = """\
When the reservoir was filled, the village went under slowly, street by street. The families had moved to the new
houses on the hill the year before, but some came down every evening to watch. The baker saw his oven go, then the
chestnut tree, then the roof of the school. In dry summers the tip of the church tower still rises out of the water,
and boys swim out to touch it, although it is forbidden and although, they say, one can hear the bell.

Heat flows from the warm body to the cold one and never by itself the other way. A refrigerator seems to break this
rule, but it only pays for what it does: a pump compresses a gas, which grows hot and gives its heat to the room,
and then lets it expand, which makes it colder than the milk. For every unit of work that the motor spends, two or
three units of heat are carried out of the box. The back of the machine is warm for both reasons.

Question: A shop sells pencils at 3 for 80 cents. How much do 12 pencils cost, and how much is left of 5 dollars?
Answer: 12 pencils are 4 groups of 3, so they cost 4 * 80 = 320 cents, or 3.20 dollars. What is left is 1.80 dollars.

def count_words(text):
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts

User: Can you explain why the sky is blue in one sentence?
Assistant: Sunlight is scattered by the air, blue light much more than red, so blue reaches our eyes from every
direction.

The first clocks with a pendulum lost perhaps fifteen seconds in a day, where the best before them had lost fifteen
minutes. Sailors hoped that such a clock would tell them their longitude, but a pendulum does not keep time on a
ship that rolls. It took another century, a carpenter's son from the north of England, and a prize that he was paid
late and not in full. His fourth machine was no larger than a saucer. After eighty-one days at sea it was slow by
five seconds.
"""
